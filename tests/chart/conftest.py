"""The real Helm, run on the chart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.build import ensure_helm

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "helm" / "everloop"
PLAIN: dict[str, Any] = {"name": "org/plain"}
ON_DEMAND: dict[str, Any] = {
    "name": "org/model",
    "source": {"claim": {"claimName": "models", "path": "model"}},
    "sessionTemplate": {
        "metadata": {"labels": {"team": "x"}},
        "spec": {"storage": {"journal": {"claim": {"claimName": "training"}}}},
    },
    "namespaces": ["team"],
    "limit": 2,
}
"""Entries of the catalogue without and with a template."""


@dataclass(frozen=True)
class Helm:
    """The command line."""

    binary: Path
    home: Path

    def run(self, *arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "HELM_CACHE_HOME": str(self.home / "helm")}
        command = [str(self.binary), *arguments, *(("--values", "-") if values is not None else ())]
        return subprocess.run(
            command, input=json.dumps(values or {}), env=environment, capture_output=True, text=True, check=False
        )

    def template(
        self, values: dict[str, Any] | None = None, namespace: str = "everloop-system"
    ) -> list[dict[str, Any]]:
        """Return the objects that an installation would create."""
        done = self.run("template", "everloop", str(CHART), "--namespace", namespace, values=values)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(ensure_helm(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def objects(helm: Helm) -> list[dict[str, Any]]:
    return helm.template()


def pick(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return the one object of that kind and name."""
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def pod_specs(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every Deployment's name with its pod's spec."""
    for o in objects:
        if o["kind"] == "Deployment":
            yield o["metadata"]["name"], o["spec"]["template"]["spec"]
