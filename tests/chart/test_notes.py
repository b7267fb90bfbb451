"""What `helm install` prints at its end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.crd import training_session_crd
from tests.chart.conftest import CHART, Helm, pick

NO_NODES = "operator.nodes is false"
NO_CRDS = "crds.keep is false"


def notes(helm: Helm, values: dict[str, Any], name: str = "tuned", namespace: str = "ml") -> str:
    """The notes of an installation; no cluster is asked."""
    done = helm.run("install", name, str(CHART), "--namespace", namespace, "--dry-run=client", values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_the_first_key_is_made_as_they_say(helm: Helm) -> None:
    """In whatever namespace the release is: the command runs in a Deployment of it, and its Secret goes there."""
    for namespace in ("ml", "everloop-system"):
        told = re.search(
            r"kubectl (-n .*?) 2>key\.txt \| kubectl apply -f -", notes(helm, {}, namespace=namespace), re.S
        )
        assert told is not None
        outer, _, inner = told[1].replace("\\\n", " ").partition(" -- ")
        flag, where, verb, target = outer.split()
        assert (flag, where, verb) == ("-n", namespace, "exec")
        kind, _, deployment = target.partition("/")
        assert kind == "deploy"
        assert pick(helm.template(namespace=namespace), "Deployment", deployment)
        python, *arguments = shlex.split(inner.replace("NAMESPACE", "team").replace("USER", "ada"))
        assert python == "python"
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        assert done.stderr.startswith("tml-")
        secret = json.loads(done.stdout)
        assert (secret["kind"], secret["metadata"]["namespace"]) == ("Secret", namespace)
        assert secret["metadata"]["labels"][names.LABEL_TYPE] == names.TYPE_API_KEY


def test_what_they_ask_kubectl_for_is_there(helm: Helm) -> None:
    """The short name of the kind and the condition that is waited for; the test of the release by its own name."""
    told = notes(helm, {})
    definition = training_session_crd()
    assert set(re.findall(r"(?:get|describe) (\w+)", told)) <= set(definition["spec"]["names"]["shortNames"])
    waited = re.findall(r"--for=condition=(\w+) (\w+)/", told)
    assert waited == [(names.CONDITION_SERVING, "tsess")]
    assert "helm test tuned --namespace ml\n" in told


@pytest.mark.parametrize(
    ("values", "endpoint"),
    [
        ({}, "http://everloop-gateway.ml:8000"),
        (
            {"ingress": {"enabled": True, "host": "everloop.example.com", "tlsSecretName": "tls"}},
            "https://everloop.example.com",
        ),
        ({"gateway": {"endpoint": "https://a.example.com"}}, "https://a.example.com"),
    ],
    ids=["inside", "ingress", "told"],
)
def test_clients_are_told_where_the_gateway_is(helm: Helm, values: dict[str, Any], endpoint: str) -> None:
    """The same address that sessions have in their status."""
    assert f"export TINKER_BASE_URL={endpoint}\n" in notes(helm, values)


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({}, set()),
        ({"operator": {"nodes": False}}, {NO_NODES}),
        ({"crds": {"keep": False}}, {NO_CRDS}),
        ({"crds": {"keep": False, "enabled": False}}, set()),
        ({"operator": {"nodes": False}, "crds": {"keep": False}}, {NO_NODES, NO_CRDS}),
    ],
    ids=["default", "without nodes", "CRDs go", "CRDs of somebody else", "both"],
)
def test_they_warn_of_what_is_given_up(helm: Helm, values: dict[str, Any], warned: set[str]) -> None:
    """Of that alone."""
    told = notes(helm, values)
    assert {each for each in (NO_NODES, NO_CRDS) if f"NOTE: {each}" in told} == warned
    assert told.count("NOTE: ") == len(warned)
