"""What the chart installs with its default values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from everloop_gateway.settings import from_environment as read_gateway
from everloop_operator.api import names
from everloop_operator.core.node_rules import parse
from everloop_operator.loop.scope import Scope
from everloop_operator.settings import OperatorSettings
from everloop_operator.settings import read as read_operator
from tests.chart.conftest import CHART, ON_DEMAND, REPOSITORY, Helm, pick, pod_specs

Objects = list[dict[str, Any]]


def test_lint_finds_nothing(helm: Helm) -> None:
    """Helm's own linter, with warnings as errors."""
    done = helm.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_crd_copies_equal_the_generated_files() -> None:
    """The chart ships the generated CRDs byte for byte: `make crds` was run."""
    generated = {path.name: path.read_bytes() for path in (REPOSITORY / "crds").glob("*.yaml")}
    assert generated
    assert {path.name: path.read_bytes() for path in (CHART / "crds-src").iterdir()} == generated


def test_installed_crds_say_what_the_generated_say(objects: Objects) -> None:
    """Passing through the template changes nothing in a CRD but labels and the annotation that keeps it."""
    for path in (REPOSITORY / "crds").glob("*.yaml"):
        generated = yaml.safe_load(path.read_text())
        installed = pick(objects, "CustomResourceDefinition", generated["metadata"]["name"])
        assert installed["spec"] == generated["spec"]
        assert installed["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_crds_can_be_left_out_and_let_go(helm: Helm) -> None:
    """crds.enabled and crds.keep do what they say."""
    kinds = {o["kind"] for o in helm.template({"crds": {"enabled": False}})}
    assert "CustomResourceDefinition" not in kinds
    let_go = helm.template({"crds": {"keep": False}})
    crd = pick(let_go, "CustomResourceDefinition", f"{names.TRAINING_SESSION_PLURAL}.{names.GROUP}")
    assert "helm.sh/resource-policy" not in crd["metadata"].get("annotations", {})


def test_pods_meet_the_restricted_standard(objects: Objects) -> None:
    """Every pod could run in a namespace that enforces the restricted Pod Security Standard, root file system shut."""
    specs = dict(pod_specs(objects))
    assert set(specs) == {"everloop-operator", "everloop-gateway"}
    for spec in specs.values():
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) <= {"name", "emptyDir", "configMap"} for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(container["resources"])
            assert {"livenessProbe", "readinessProbe"} <= set(container)
            assert "command" not in container


def test_one_operator_and_two_gateways_on_different_nodes(objects: Objects) -> None:
    """The operator is replaced before its successor starts; the gateways spread."""
    operator = pick(objects, "Deployment", "everloop-operator")["spec"]
    assert operator["replicas"] == 1
    assert operator["strategy"] == {"type": "Recreate"}
    gateway = pick(objects, "Deployment", "everloop-gateway")["spec"]
    assert gateway["replicas"] == 2
    (spread,) = gateway["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == names.NODE_HOSTNAME_LABEL
    assert spread["labelSelector"]["matchLabels"] == gateway["selector"]["matchLabels"]


def test_pods_leave_a_lost_node_within_seconds(helm: Helm) -> None:
    """Both Deployments tolerate a dead node for evictionSeconds, not for Kubernetes' five minutes."""
    for _, spec in pod_specs(helm.template({"evictionSeconds": 7})):
        assert {
            toleration["key"]: toleration["tolerationSeconds"]
            for toleration in spec["tolerations"]
            if toleration["effect"] == "NoExecute"
        } == {"node.kubernetes.io/not-ready": 7, "node.kubernetes.io/unreachable": 7}


def test_environment_is_the_one_the_programs_read(helm: Helm, tmp_path: Path) -> None:
    """Both programs accept the rendered environment and read in it what the values say; no variable goes unread."""
    values = {
        "image": "operator:7",
        "trainerImage": "trainer:7",
        "operator": {"nodeLostSeconds": 3.5, "namespaces": ["team-a", "team-b"], "nodes": False},
        "gateway": {"logLevel": "DEBUG", "endpoint": "https://everloop.example.com"},
        "nodeHealth": {"fleetCapPercent": 35, "profiles": ["karpenter"]},
    }
    rendered = helm.template(values, namespace="ours")
    environments = {name: _environment(spec) for name, spec in pod_specs(rendered)}
    rules = tmp_path / "rules.json"
    rules.write_text(pick(rendered, "ConfigMap", "everloop-node-rules")["data"]["rules.json"])
    assert environments["everloop-operator"]["EVERLOOP_NODE_RULES"] == "/etc/everloop/rules.json"
    environments["everloop-operator"]["EVERLOOP_NODE_RULES"] = str(rules)
    assert read_operator(environments["everloop-operator"]) == OperatorSettings(
        release_namespace="ours",
        operator_image="operator:7",
        trainer_image="trainer:7",
        gateway_endpoint="https://everloop.example.com",
        pod_ip="127.11.0.5",
        node_lost_seconds=3.5,
        node_rules=parse(json.dumps(yaml.safe_load((CHART / "profiles/karpenter.yaml").read_text()))),
        scope=Scope(("team-a", "team-b"), nodes=False),
        fleet_cap=0.35,
        metrics=True,
    )
    gateway = read_gateway(environments["everloop-gateway"])
    assert (gateway.release_namespace, gateway.pod_ip, gateway.log_level) == ("ours", "127.11.0.5", "DEBUG")
    assert (gateway.namespaces, gateway.metrics) == (("team-a", "team-b"), True)
    for module, environment in (("everloop_operator", "everloop-operator"), ("everloop_gateway", "everloop-gateway")):
        source = (REPOSITORY / "operator" / module / "settings.py").read_text()
        assert not [name for name in environments[environment] if f'"{name}"' not in source]


def test_endpoint_is_the_service_unless_told_otherwise(helm: Helm) -> None:
    """Without gateway.endpoint users are told the Service's name in the release namespace."""
    specs = dict(pod_specs(helm.template(namespace="ours")))
    told = _environment(specs["everloop-operator"])["EVERLOOP_GATEWAY_ENDPOINT"]
    assert told == f"http://everloop-gateway.ours:{names.GATEWAY_PORT}"


def _environment(spec: dict[str, Any]) -> dict[str, str]:
    """What the kubelet would make of a container's env."""
    fields = {"status.podIP": "127.11.0.5"}
    return {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in spec["containers"][0]["env"]
    }


def test_service_leads_to_the_gateway(objects: Objects) -> None:
    """The Service's selector picks the gateway's pods, and its port is the one that they listen on."""
    service = pick(objects, "Service", "everloop-gateway")["spec"]
    gateway = pick(objects, "Deployment", "everloop-gateway")["spec"]["template"]
    assert service["selector"].items() <= gateway["metadata"]["labels"].items()
    operator = pick(objects, "Deployment", "everloop-operator")["spec"]["template"]
    assert not service["selector"].items() <= operator["metadata"]["labels"].items()
    (port,) = service["ports"]
    (listening,) = (port for port in gateway["spec"]["containers"][0]["ports"] if port["name"] == "http")
    assert port["port"] == listening["containerPort"] == names.GATEWAY_PORT
    assert port["targetPort"] == listening["name"]


def test_catalogue_holds_the_values(helm: Helm) -> None:
    """The ConfigMap that the gateway follows says what values.yaml says, and is an empty list without any."""
    catalogue = [{"name": "org/model", "aliases": ["model"], "tokenizer_id": "/models/m", "alpha": 32}]
    for given in (catalogue, [ON_DEMAND], []):
        config_map = pick(helm.template({"catalogue": given}), "ConfigMap", names.CATALOGUE_CONFIG_MAP)
        assert json.loads(config_map["data"][names.CATALOGUE_FIELD]) == given


def test_every_value_is_explained() -> None:
    """A comment stands above each value, and the schema knows exactly the values that are there."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        key = re.match(r"(  )?(\w+):", line)
        if key and key[0] not in ("crds:", "operator:", "gateway:"):
            assert lines[number - 1].lstrip().startswith("#"), f"{key[2]} has no comment"
    schema = json.loads((CHART / "values.schema.json").read_text())
    _same_keys(yaml.safe_load("\n".join(lines)), schema, "values")


def _same_keys(values: Any, schema: dict[str, Any], where: str) -> None:
    properties = schema.get("properties")
    if properties is None or not isinstance(values, dict):
        return
    assert set(values) == set(properties) - {"global"}, where
    for key, value in values.items():
        _same_keys(value, properties[key], f"{where}.{key}")
