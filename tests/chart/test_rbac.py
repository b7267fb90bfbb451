"""The rights of operator and gateway: least, explicit, and those that the code asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop_gateway.catalogue import catalogue_entries
from everloop_operator.api import names
from everloop_operator.cluster.rbac import NAMESPACE_RULES, NODE_RULES, RELEASE_RULES, Rule
from tests.chart.conftest import ON_DEMAND, PLAIN, Helm, pick

Objects = list[dict[str, Any]]
GATEWAY = "everloop-gateway"
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


def asked(rules: tuple[Rule, ...]) -> set[Right]:
    """The single rights that the operator's code lists."""
    return {
        (rule.group, rule.resource, name, verb) for rule in rules for name in rule.names or ("",) for verb in rule.verbs
    }


def test_operator_has_the_rights_that_its_code_lists(objects: Objects) -> None:
    """Not one more and not one less than `cluster/rbac.py` says, each with its reason there."""
    assert rights(pick(objects, "ClusterRole", "everloop-operator")) == asked(NAMESPACE_RULES)
    assert rights(pick(objects, "ClusterRole", "everloop-operator-nodes")) == asked(NODE_RULES)
    assert rights(pick(objects, "Role", "everloop-operator")) == asked(RELEASE_RULES)


@pytest.mark.parametrize("nodes", [True, False])
def test_rights_in_listed_namespaces_only(helm: Helm, nodes: bool) -> None:
    """With operator.namespaces there is the same Role in each, and over the cluster at most nodes and volumes."""
    values = {"operator": {"namespaces": ["team-a", "team-b"], "nodes": nodes}, "userRoles": False}
    objects = helm.template(values)
    for namespace in ("team-a", "team-b"):
        of_namespace = [o for o in objects if o["metadata"].get("namespace") == namespace]
        for component in ("operator", "gateway"):
            role = pick(of_namespace, "Role", f"everloop-{component}-sessions")
            everywhere = pick(helm.template(), "ClusterRole", f"everloop-{component}")
            assert rights(role) == rights(everywhere)
            binding = pick(of_namespace, "RoleBinding", f"everloop-{component}-sessions")
            assert binding["roleRef"]["name"] == role["metadata"]["name"]
            [subject] = binding["subjects"]
            assert (subject["name"], subject["namespace"]) == (f"everloop-{component}", "everloop-system")
    cluster_wide = {o["metadata"]["name"] for o in objects if o["kind"] == "ClusterRole"}
    assert cluster_wide == ({"everloop-operator-nodes"} if nodes else set())


def test_only_the_gateways_policy_is_for_the_whole_cluster(helm: Helm) -> None:
    """With every mode turned to the least, it and its binding are all that belongs to no namespace: docs/install.md."""
    least = {"operator": {"namespaces": ["team-a"], "nodes": False}, "userRoles": False, "crds": {"enabled": False}}
    everywhere = {o["kind"] for o in helm.template(least) if "namespace" not in o["metadata"]}
    assert everywhere == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}


def test_rights_without_nodes(helm: Helm) -> None:
    """operator.nodes off: nothing is read that belongs to no namespace."""
    roles_there = roles(helm.template({"operator": {"nodes": False}}))
    read = {right[1] for role in roles_there for right in rights(role)}
    assert not read & {"nodes", "persistentvolumes"}


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


def writing(objects: Objects, kind: str) -> set[Right]:
    """What the gateway may do but read: everywhere (ClusterRoles), or in the release namespace (Role)."""
    own = [role for role in roles(objects) if role["kind"] == kind and role["metadata"]["name"].startswith(GATEWAY)]
    return {right for role in own for right in rights(role) if right[3] not in ("get", "list", "watch")}


WAKES = (names.GROUP, names.TRAINING_SESSION_PLURAL, "", "patch")
BINDINGS = {("", "configmaps", "", "create"), WAKES}
INTENTS = {("", "configmaps", "", "create"), ("", "configmaps", "", "delete")}
SESSIONS = {
    (names.GROUP, names.TRAINING_SESSION_PLURAL, "", "create"),
    ("authorization.k8s.io", "subjectaccessreviews", "", "create"),
}


def test_gateway_writes_bindings_and_intents_and_nothing_else(objects: Objects) -> None:
    """It may create ConfigMaps, and delete them in the release namespace only; of a session it patches, to wake it."""
    assert writing(objects, "ClusterRole") == BINDINGS
    assert writing(objects, "Role") == INTENTS
    granted = {right for role in roles(objects) for right in rights(role) if role["metadata"]["name"] == GATEWAY}
    assert {name for _, resource, name, verb in granted if (resource, verb) == ("secrets", "get")} == {
        names.MASTER_KEY_SECRET
    }


def test_gateway_is_held_to_the_annotation_that_wakes(objects: Objects) -> None:
    """A policy names its account, and denies; what it lets pass is tried on a real API server, end to end."""
    policy = pick(objects, "ValidatingAdmissionPolicy", GATEWAY)["spec"]
    account = "system:serviceaccount:everloop-system:everloop-gateway"
    assert [condition["expression"] for condition in policy["matchConditions"]] == [
        f'request.userInfo.username == "{account}"'
    ]
    assert policy["failurePolicy"] == "Fail"
    assert names.ANNOTATION_WAKE in str(policy["validations"])
    binding = pick(objects, "ValidatingAdmissionPolicyBinding", GATEWAY)["spec"]
    assert (binding["policyName"], binding["validationActions"]) == (GATEWAY, ["Deny"])


@pytest.mark.parametrize(
    ("entries", "allowed", "more"),
    [
        ([PLAIN], True, set()),
        ([PLAIN, ON_DEMAND], True, SESSIONS),
        ([PLAIN, ON_DEMAND], False, set()),
    ],
)
def test_gateway_creates_sessions_only_where_a_template_says_so(
    helm: Helm, entries: Objects, allowed: bool, more: set[Right]
) -> None:
    """Without a template, or with gateway.createSessions off, it has neither the right nor the template."""
    objects = helm.template({"catalogue": entries, "gateway": {"createSessions": allowed}})
    assert (writing(objects, "ClusterRole"), writing(objects, "Role")) == (BINDINGS | more, INTENTS)
    read = json.loads(pick(objects, "ConfigMap", names.CATALOGUE_CONFIG_MAP)["data"][names.CATALOGUE_FIELD])
    assert any(entry.template for entry in catalogue_entries(read)) == bool(more)


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
    assert {right[1] for right in rights(edit)} == {names.TRAINING_SESSION_PLURAL, names.RL_JOB_PLURAL}
