"""What the chart installs for Prometheus and Grafana."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop_operator.api import names
from monitoring.__main__ import CHART as GENERATED
from monitoring.__main__ import texts
from monitoring.generate import alerts, dashboard
from tests.chart.conftest import CHART, Helm, pick
from tests.chart.test_rbac import rights

ALL = {"podMonitors": True, "alerts": True, "dashboards": True, "labels": {"release": "prometheus"}}


def test_generated_files_are_current() -> None:
    """`make dashboards` was run."""
    assert {path.name: path.read_text() for path in GENERATED.iterdir()} == texts()


def test_nothing_needs_foreign_crds_unless_asked_for(objects: list[dict[str, Any]]) -> None:
    """A cluster without the Prometheus Operator takes the chart as it is."""
    assert not [o for o in objects if o["apiVersion"].startswith("monitoring.coreos.com")]
    assert not [o for o in objects if o["metadata"]["name"] == "everloop-dashboard"]


def test_pod_monitor_reads_both_with_the_operators_secret(helm: Helm) -> None:
    """It selects the pods of both, at the port that they have, and shows the token that the operator writes."""
    objects = helm.template({"metrics": ALL})
    monitor = pick(objects, "PodMonitor", "everloop")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    wanted = {"name": names.METRICS_SECRET, "key": names.TOKEN_FIELD}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": wanted}
    selector = monitor["spec"]["selector"]
    for name in ("everloop-operator", "everloop-gateway"):
        pod = pick(objects, "Deployment", name)["spec"]["template"]
        labels = pod["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items()
        assert labels["app.kubernetes.io/component"] in selector["matchExpressions"][0]["values"]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == names.METRICS_PORT
    assert ("", "secrets", "", "patch") in rights(pick(objects, "Role", "everloop-operator"))


def test_alerts_and_dashboard_pass_through_helm_unchanged(helm: Helm) -> None:
    """Braces in them are Prometheus' and Grafana's, not Helm's."""
    objects = helm.template({"metrics": ALL})
    assert pick(objects, "PrometheusRule", "everloop")["spec"] == alerts()
    stored = pick(objects, "ConfigMap", "everloop-dashboard")
    assert stored["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(stored["data"]["everloop.json"]) == dashboard()


@pytest.mark.parametrize("wanted", ["podMonitors", "alerts"])
def test_without_metrics_nothing_reads_them(helm: Helm, wanted: str) -> None:
    """metrics.enabled off leaves neither port nor right, and what would read it is refused."""
    objects = helm.template({"metrics": {"enabled": False}})
    for name in ("everloop-operator", "everloop-gateway"):
        (container,) = pick(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"]
        assert names.METRICS_PORT not in {port["containerPort"] for port in container["ports"]}
    assert names.METRICS_SECRET not in str(pick(objects, "Role", "everloop-operator"))
    done = helm.run("template", "everloop", str(CHART), values={"metrics": {"enabled": False, wanted: True}})
    assert done.returncode != 0
    assert "need metrics.enabled" in done.stderr
