"""Puts Everloop on a local cluster, by the commands a user would type.

Everything goes through the real ``helm`` and ``kubectl``; what they print is kept for the
error message when one of them fails.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RELEASE_NAMESPACE = "everloop-system"
CHART = Path(__file__).resolve().parents[1] / "helm" / "everloop"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "trainingsession.yaml"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Tools:
    """The command line of one cluster."""

    kubectl: Path
    helm: Path
    kubeconfig: Path

    def run(
        self, *argv: str | Path, stdin: str | None = None, seconds: float = 180.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against the cluster.

        Raises:
            RuntimeError: it failed; the message has the command and what it wrote.
        """
        # kubectl and helm would leave what they learn of each cluster in the home directory.
        cache = str(self.kubeconfig.with_name("kube-cache"))
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": cache}
        done = subprocess.run(
            [str(a) for a in argv], input=stdin, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, argv))} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def kube(self, *argv: str, stdin: str | None = None, seconds: float = 180.0) -> str:
        """Standard output of a kubectl command."""
        return self.run(self.kubectl, *argv, stdin=stdin, seconds=seconds).stdout

    def get(self, *argv: str) -> Any:
        """The object that ``kubectl get ... -o json`` prints."""
        return json.loads(self.kube("get", *argv, "-o", "json"))


def install_chart(tools: Tools, *, operator_image: str, trainer_image: str, tokenizer: Path) -> None:
    """``helm install`` with the images of the local cluster, and wait until both Deployments are up.

    The catalogue lets clients whose subject may do so (`allow_sessions`) make the TrainingSession of
    examples/trainingsession.yaml by asking for its base model.
    """
    example = yaml.safe_load(EXAMPLE.read_text())["spec"]
    base_model = example.pop("baseModel")
    catalogue = [
        {
            "name": base_model["name"],
            "aliases": ["SmolLM2-135M-Instruct"],
            "tokenizer_id": str(tokenizer),
            "alpha": 32,
            "source": base_model["source"],
            "sessionTemplate": {"spec": example},
        }
    ]
    values = {"image": operator_image, "trainerImage": trainer_image, "catalogue": catalogue}
    tools.run(
        tools.helm, "install", "everloop", CHART, "--namespace", RELEASE_NAMESPACE, "--create-namespace",
        "--values", "-", "--wait", "--timeout", "120s", stdin=json.dumps(values),
    )  # fmt: skip


def volume(name: str, namespace: str, path: Path, *, mode: str) -> list[dict[str, Any]]:
    """A shared directory of the machine as PersistentVolume and claim: stands in for Lustre.

    No node affinity: every node sees the same files, as with a cluster file system.
    """
    size = {"storage": "100Gi"}
    pv_spec: Mapping[str, Any] = {
        "capacity": size,
        "accessModes": [mode],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(path), "type": "Directory"},
        "claimRef": {"namespace": namespace, "name": name},
    }
    claim_spec = {
        "accessModes": [mode],
        "storageClassName": "",
        "volumeName": f"{namespace}-{name}",
        "resources": {"requests": size},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{namespace}-{name}"}, "spec": pv_spec},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": claim_spec,
        },
    ]


def make_tenant(tools: Tools, namespace: str, *, training: Path, models: Path) -> str:
    """A namespace with its two claims (``training``, ``models``) and an API key for it.

    Returns:
        The API key.
    """
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        *volume("training", namespace, training, mode="ReadWriteMany"),
        *volume("models", namespace, models, mode="ReadOnlyMany"),
    ]
    tools.kube("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    return mint_key(tools, namespace)


def mint_key(tools: Tools, namespace: str, subject: str = "demo") -> str:
    """Mint an API key in the gateway's pod and apply its manifest, as the chart's notes say."""
    minted = tools.run(
        tools.kubectl, "-n", RELEASE_NAMESPACE, "exec", "deploy/everloop-gateway", "--", "python", "-m",
        "everloop_gateway", "mint-key", "--namespace", namespace, "--subject", subject,
    )  # fmt: skip
    tools.kube("apply", "-f", "-", stdin=minted.stdout)
    return minted.stderr.strip().splitlines()[-1].split()[-1]


def allow_sessions(tools: Tools, namespace: str, subject: str = "demo") -> None:
    """Let a key's subject create TrainingSessions in its namespace, and so let the gateway make them on demand."""
    tools.kube(
        "-n", namespace, "create", "rolebinding", f"{subject}-trains", "--clusterrole", "everloop-edit",
        "--user", subject,
    )  # fmt: skip


def gateway_url(tools: Tools) -> str:
    """Address of the gateway's Service: what a user sets as TINKER_BASE_URL."""
    spec = tools.get("-n", RELEASE_NAMESPACE, "service", "everloop-gateway")["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
