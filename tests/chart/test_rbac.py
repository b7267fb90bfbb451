"""The rights of operator and gateway: least, explicit, and those that the code asks for."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.cluster.rbac import CLUSTER_RULES, RELEASE_RULES, Rule
from tests.chart.conftest import pick

Objects = list[dict[str, Any]]
Right = tuple[str, str, str, str]
"""API group, resource, name of the one object or "", verb."""


def rights(role: dict[str, Any]) -> set[Right]:
    """Take a role apart into single rights."""
    return {
        (group, resource, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def roles(objects: Objects) -> Objects:
    return [o for o in objects if o["kind"] in ("Role", "ClusterRole")]


@pytest.mark.parametrize(("kind", "rules"), [("ClusterRole", CLUSTER_RULES), ("Role", RELEASE_RULES)])
def test_operator_has_the_rights_that_its_code_lists(objects: Objects, kind: str, rules: tuple[Rule, ...]) -> None:
    """Not one more and not one less than `cluster/rbac.py` says, each with its reason there."""
    asked = {
        (rule.group, rule.resource, name, verb) for rule in rules for name in rule.names or ("",) for verb in rule.verbs
    }
    assert rights(pick(objects, kind, "everloop-operator")) == asked


def test_no_wildcards(objects: Objects) -> None:
    """No role grants a whole group, every resource or every verb."""
    found = [right for role in roles(objects) for right in rights(role)]
    assert found
    assert not [right for right in found if "*" in right]


def test_secrets_are_read_in_the_release_namespace_only(objects: Objects) -> None:
    """No right over all namespaces reads a Secret: tenants' Secrets are closed to operator and gateway."""
    for role in roles(objects):
        if role["kind"] == "ClusterRole":
            readable = {verb for _, resource, _, verb in rights(role) if resource == "secrets"}
            assert not readable & {"get", "list", "watch"}, role["metadata"]["name"]


def test_nodes_are_only_read(objects: Objects) -> None:
    """Nothing here cordons, taints, labels or deletes a node."""
    for role in roles(objects):
        verbs = {verb for _, resource, _, verb in rights(role) if resource.startswith("nodes")}
        assert verbs <= {"get", "list", "watch"}


def test_gateway_writes_bindings_and_intents_and_nothing_else(objects: Objects) -> None:
    """It may create ConfigMaps, and delete them in the release namespace only; it changes nothing."""
    everywhere = rights(pick(objects, "ClusterRole", "everloop-gateway"))
    release = rights(pick(objects, "Role", "everloop-gateway"))
    create, delete = ("", "configmaps", "", "create"), ("", "configmaps", "", "delete")
    assert {right for right in everywhere if right[3] not in ("get", "list", "watch")} == {create}
    assert {right for right in release if right[3] not in ("get", "list", "watch")} == {create, delete}
    granted = everywhere | release
    assert (names.GROUP, names.TRAINING_SESSION_PLURAL, "", "watch") in granted
    assert ("", "configmaps", names.CATALOGUE_CONFIG_MAP, "watch") in granted


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_roles_are_bound_to_the_pods_account(objects: Objects, component: str) -> None:
    """Both roles of a component are bound to the service account that its pods run under, and to no other."""
    name = f"everloop-{component}"
    account = pick(objects, "Deployment", name)["spec"]["template"]["spec"]["serviceAccountName"]
    pick(objects, "ServiceAccount", account)
    for kind in ("Role", "ClusterRole"):
        binding = pick(objects, f"{kind}Binding", name)
        assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "everloop-system"}]


def test_users_rights_join_kubernetes_own_roles(objects: Objects) -> None:
    """Whoever has view sees sessions, whoever has edit or admin makes them; status stays the operator's."""
    view, edit = (pick(objects, "ClusterRole", f"everloop-{name}") for name in ("view", "edit"))
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert {right[3] for right in rights(view)} == {"get", "list", "watch"}
    assert {right[1] for right in rights(edit)} == {names.TRAINING_SESSION_PLURAL}
