"""Ways to the gateway from outside, and who may open connections to what."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_gateway.app import MAX_PROTOBUF_BYTES
from everloop_operator.api import names
from tests.chart.conftest import CHART, Helm, pick
from tests.operator.restricted import violations

Objects = list[dict[str, Any]]
HOST = "everloop.example.com"
INGRESS: dict[str, Any] = {"enabled": True, "host": HOST, "tlsSecretName": "everloop-tls"}
LISTENER = {"name": "public", "namespace": "gateways", "sectionName": "https"}
LONGEST_SUBMIT_SECONDS = 120
"""The SDK's own limit on one attempt of a call."""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gateway": {"serviceType": "NodePort"}}, "gateway.serviceType"),
        ({"gateway": {"serviceType": "LoadBalancer"}}, "gateway.serviceType"),
        ({"ingress": {"enabled": True, "host": HOST}}, "ingress.tlsSecretName"),
        ({"ingress": {"enabled": True, "tlsSecretName": "t"}}, "ingress.host"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}, "httpRoute.parentRefs.0.sectionName"),
    ],
)
def test_plain_http_outside_is_refused(helm: Helm, values: dict[str, Any], named: str) -> None:
    """Nothing is rendered that carries API keys unencrypted out of the cluster, and the value is named."""
    done = helm.run("template", "everloop", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"serviceType": "LoadBalancer"}},
        {"ingress": {"enabled": True, "host": HOST}},
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    ],
)
def test_plain_http_can_be_asked_for(helm: Helm, values: dict[str, Any]) -> None:
    """Where something else ends TLS."""
    helm.template({**values, "gateway": {**values.get("gateway", {}), "allowPlainHTTP": True}})


def test_ingress_leads_to_the_gateway_with_time_and_room(helm: Helm) -> None:
    """TLS for the host, the largest body, no buffering, and more time than any call takes; users are told https."""
    objects = helm.template({"ingress": INGRESS})
    ingress = pick(objects, "Ingress", "everloop-gateway")
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    service = pick(objects, "Service", path["backend"]["service"]["name"])
    assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    assert (rule["host"], ingress["spec"]["tls"]) == (HOST, [{"hosts": [HOST], "secretName": "everloop-tls"}])
    told = {key.split("/")[1]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert told["proxy-body-size"] == f"{MAX_PROTOBUF_BYTES >> 20}m"
    assert int(told["proxy-read-timeout"]) > LONGEST_SUBMIT_SECONDS
    assert (told["proxy-buffering"], told["proxy-request-buffering"]) == ("off", "off")
    operator = pick(objects, "Deployment", "everloop-operator")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "EVERLOOP_GATEWAY_ENDPOINT", "value": f"https://{HOST}"} in operator["env"]


def test_own_annotations_of_the_ingress_win(helm: Helm) -> None:
    """One that is set replaces ours, the others stay."""
    key = "nginx.ingress.kubernetes.io/proxy-read-timeout"
    ingress = pick(helm.template({"ingress": {**INGRESS, "annotations": {key: "60"}}}), "Ingress", "everloop-gateway")
    assert ingress["metadata"]["annotations"][key] == "60"
    assert len(ingress["metadata"]["annotations"]) > 3


def test_http_route_leads_to_the_gateway_with_time(helm: Helm) -> None:
    """As the Ingress: the Service's port, and a limit beyond any call."""
    route = pick(
        helm.template({"httpRoute": {"enabled": True, "parentRefs": [LISTENER], "hostnames": [HOST]}}),
        "HTTPRoute",
        "everloop-gateway",
    )
    [rule] = route["spec"]["rules"]
    assert (route["spec"]["parentRefs"], route["spec"]["hostnames"]) == ([LISTENER], [HOST])
    assert rule["backendRefs"] == [{"name": "everloop-gateway", "port": names.GATEWAY_PORT}]
    for limit in rule["timeouts"].values():
        assert int(limit.removesuffix("s")) > LONGEST_SUBMIT_SECONDS


@pytest.mark.parametrize(
    ("name", "component", "port", "sources"),
    [
        ("sessions", names.COMPONENT_TRAINER, names.TRAINER_PORT, {"gateway", "operator"}),
        ("drivers", names.COMPONENT_DRIVER, names.PROGRESS_PORT, {"operator"}),
    ],
)
def test_pods_of_tenants_take_connections_from_few(
    helm: Helm, name: str, component: str, port: int, sources: set[str]
) -> None:
    """In each listed namespace the policy selects what the operator makes, and lets in only what asks it."""
    objects = helm.template({"networkPolicies": {"namespaces": ["team-a", "team-b"]}}, namespace="ours")
    policies = [o for o in objects if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == f"everloop-{name}"]
    assert [o["metadata"]["namespace"] for o in policies] == ["team-a", "team-b"]
    for policy in (o["spec"] for o in policies):
        selected = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_COMPONENT: component}
        assert policy["podSelector"]["matchLabels"] == selected
        [rule] = policy["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
        [source] = rule["from"]
        assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ours"}
        [among] = source["podSelector"]["matchExpressions"]
        let_in = set()
        for deployment in ("gateway", "operator"):
            labels = pick(objects, "Deployment", f"everloop-{deployment}")["spec"]["template"]["metadata"]["labels"]
            assert source["podSelector"]["matchLabels"].items() <= labels.items()
            let_in |= {deployment} if labels[among["key"]] in among["values"] else set()
        assert let_in == sources


def test_policies_of_the_release(helm: Helm) -> None:
    """The gateway listens to everybody at its port, both at the metrics port; listed namespaces get theirs."""
    objects = helm.template({"operator": {"namespaces": ["team"]}})
    gateway, operator = (pick(objects, "NetworkPolicy", f"everloop-{name}")["spec"] for name in ("gateway", "operator"))
    calls, metrics = ({"protocol": "TCP", "port": port} for port in (names.GATEWAY_PORT, names.METRICS_PORT))
    assert gateway["ingress"] == [{"ports": [calls, metrics]}]
    assert (operator["ingress"], operator["policyTypes"]) == ([{"ports": [metrics]}], ["Ingress"])
    unmeasured = helm.template({"metrics": {"enabled": False}})
    gateway, operator = (
        pick(unmeasured, "NetworkPolicy", f"everloop-{name}")["spec"]["ingress"] for name in ("gateway", "operator")
    )
    assert (gateway, operator) == ([{"ports": [calls]}], [])
    assert pick(objects, "NetworkPolicy", "everloop-sessions")["metadata"]["namespace"] == "team"
    without = helm.template({"networkPolicies": {"enabled": False}})
    assert not [o for o in without if o["kind"] == "NetworkPolicy"]


def test_gateways_leave_one_at_a_time_and_finish(objects: Objects) -> None:
    """Evictions take one, and a pod that ends takes calls for a while, then has the time that the server wants."""
    gateway = pick(objects, "Deployment", "everloop-gateway")["spec"]
    budget = pick(objects, "PodDisruptionBudget", "everloop-gateway")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= gateway["template"]["metadata"]["labels"].items()
    pod = gateway["template"]["spec"]
    wait = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < wait < pod["terminationGracePeriodSeconds"] - 20


def test_helm_test_asks_the_gateway(objects: Objects) -> None:
    """A pod of the same image, as confined as the others, that asks the Service whether it is ready."""
    pod = pick(objects, "Pod", "everloop-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert violations(pod) == []
    [container] = pod["spec"]["containers"]
    assert container["args"][-1] == f"http://everloop-gateway.everloop-system:{names.GATEWAY_PORT}/readyz"
