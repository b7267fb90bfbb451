"""Wrong values are refused before anything is installed, and the refusal names the value."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.conftest import CHART, ON_DEMAND, Helm


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"image": ""}, "image"),
        ({"imagePullPolicy": "Sometimes"}, "imagePullPolicy"),
        ({"gateway": {"replicas": 1}}, "gateway/replicas"),
        ({"gateway": {"endpoint": "everloop.example.com"}}, "gateway/endpoint"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"operator": {"nodeLostSeconds": 0}}, "operator/nodeLostSeconds"),
        ({"operator": {"resources": {"limit": {}}}}, "limit"),
        ({"catalogue": [{"aliases": ["a"]}]}, "catalogue/0"),
        ({"catalogue": [{"name": "m", "alpha": "32"}]}, "catalogue/0/alpha"),
        ({"catalogue": [{**ON_DEMAND, "limit": 0}]}, "catalogue/0/limit"),
        ({"catalogue": [{**ON_DEMAND, "namespaces": "team"}]}, "catalogue/0/namespaces"),
        ({"catalogue": [{**ON_DEMAND, "source": {}}]}, "catalogue/0/source"),
        ({"catalogue": [{key: ON_DEMAND[key] for key in ("name", "sessionTemplate")}]}, "'source'"),
        ({"catalogue": [{"name": "m", "limit": 1}]}, "'sessionTemplate'"),
        ({"catalogue": [{**ON_DEMAND, "sessionTemplate": {}}]}, "catalogue/0/sessionTemplate"),
        (
            {"catalogue": [{**ON_DEMAND, "sessionTemplate": {"spec": {"storage": {}}}}]},
            "catalogue/0/sessionTemplate/spec/storage",
        ),
        (
            {"catalogue": [{**ON_DEMAND, "sessionTemplate": {"spec": {"storage": {"journal": {}}, "baseModel": {}}}}]},
            "catalogue/0/sessionTemplate/spec/baseModel",
        ),
        ({"gateway": {"createSessions": "no"}}, "gateway/createSessions"),
        ({"gateway": {"batchedPolls": "true"}}, "gateway/batchedPolls"),
        ({"gateway": {"stableReinforceStandIn": "true"}}, "gateway/stableReinforceStandIn"),
        ({"evictionSeconds": "5"}, "evictionSeconds"),
        ({"nodeLostSeconds": 2}, "nodeLostSeconds"),
        ({"nodeHealth": {"profiles": ["hyperpods"]}}, "nodeHealth/profiles/0"),
        ({"nodeHealth": {"fleetCapPercent": 120}}, "nodeHealth/fleetCapPercent"),
        (
            {"nodeHealth": {"rules": [{"name": "r", "kind": "Label", "severity": "Move"}]}},
            "nodeHealth/rules/0/severity",
        ),
        ({"nodeHealth": {"rules": [{"name": "r", "kind": "Label", "debounce": 3}]}}, "debounce"),
    ],
)
def test_wrong_value_is_named(helm: Helm, values: dict[str, Any], named: str) -> None:
    """The schema refuses it."""
    done = helm.run("template", "everloop", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr, done.stderr


def test_right_values_reach_the_pods(helm: Helm) -> None:
    """Placement, resources and pull secrets of each component arrive where Kubernetes looks for them."""
    component: dict[str, Any] = {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    }
    values = {
        "operator": component,
        "gateway": {**component, "replicas": 3},
        "imagePullSecrets": [{"name": "registry"}],
    }
    deployments = [o for o in helm.template(values) if o["kind"] == "Deployment"]
    assert {d["metadata"]["name"]: d["spec"]["replicas"] for d in deployments} == {
        "everloop-gateway": 3,
        "everloop-operator": 1,
    }
    for deployment in deployments:
        spec = deployment["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == component["nodeSelector"]
        assert component["tolerations"][0] in spec["tolerations"]
        resources = spec["containers"][0]["resources"]
        assert (resources["requests"]["cpu"], resources["limits"]["memory"]) == ("1", "1Gi")
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
