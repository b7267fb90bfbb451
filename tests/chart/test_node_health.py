"""Rules on node health as values of the chart."""

from __future__ import annotations

import json
from typing import Any

import yaml

from everloop_operator.core.node_rules import NodeRule, parse
from tests.chart.conftest import CHART, Helm, pick


def rendered(helm: Helm, values: dict[str, Any]) -> tuple[NodeRule, ...]:
    """The rules as the operator reads them."""
    return parse(pick(helm.template({"nodeHealth": values}), "ConfigMap", "everloop-node-rules")["data"]["rules.json"])


def test_all_profiles_are_on_by_default(helm: Helm) -> None:
    """Every rule of every profile reaches the operator, which can read it."""
    rules = parse(pick(helm.template(), "ConfigMap", "everloop-node-rules")["data"]["rules.json"])
    profiles = [yaml.safe_load(path.read_text()) for path in (CHART / "profiles").glob("*.yaml")]
    assert {rule.name for rule in rules} == {rule["name"] for profile in profiles for rule in profile}
    assert len(profiles) == 9


def test_an_own_rule_replaces_that_of_a_profile(helm: Helm) -> None:
    """Own rules come last, and the last of one name counts."""
    own = {"name": "karpenter-disrupted", "kind": "Taint", "key": "karpenter.sh/disrupted", "severity": "MoveNow"}
    assert [rule.severity for rule in rendered(helm, {"profiles": ["karpenter"], "rules": [own]})] == ["MoveNow"]


def test_other_rules_restart_the_operator(helm: Helm) -> None:
    """They are read once: the pod template changes with them."""
    hashes = [
        pick(helm.template(values), "Deployment", "everloop-operator")["spec"]["template"]["metadata"]["annotations"]
        for values in ({}, {}, {"nodeHealth": {"profiles": ["gke"]}})
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_schema_of_values_is_that_of_the_operator() -> None:
    """A rule that the one takes the other takes: same fields, same words, same limits."""
    values = json.loads((CHART / "values.schema.json").read_text())
    listed, model = values["$defs"]["nodeRule"], NodeRule.model_json_schema(by_alias=True)
    assert listed["required"] == model["required"]
    assert set(listed["properties"]) == set(model["properties"])
    assert listed["properties"]["severity"]["enum"] == model["$defs"]["Severity"]["enum"]
    for name, field in listed["properties"].items():
        for limit in ("pattern", "maxLength", "minimum", "maximum"):
            assert field.get(limit) == model["properties"][name].get(limit), f"{name}: {limit}"
    profiles = sorted(path.stem for path in (CHART / "profiles").glob("*.yaml"))
    assert sorted(values["properties"]["nodeHealth"]["properties"]["profiles"]["items"]["enum"]) == profiles
