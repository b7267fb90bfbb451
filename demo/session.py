"""A TrainingSession on a local cluster, from nothing to serving, and what can be seen of it from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap import stage
from demo import adapters, install
from devcluster.cluster import Cluster
from everloop_trainer.store.dump import dump

NAME = "smollm2"
"""Of the TrainingSession in examples/trainingsession.yaml."""
MANIFEST = Path(__file__).resolve().parents[1] / "examples" / "trainingsession.yaml"


@dataclass(frozen=True, slots=True)
class Session:
    """A serving TrainingSession, and what a user of it has: an address and a key."""

    cluster: Cluster
    tools: install.Tools
    namespace: str
    url: str
    key: str
    name: str = NAME

    @property
    def lineage_root(self) -> Path:
        """Where it keeps its journal and checkpoints on the shared volume."""
        return self.cluster.shared / "training" / self.namespace / self.name

    def journal(self) -> list[dict[str, Any]]:
        """Every record of its history so far."""
        return list(dump(self.lineage_root))

    def status(self) -> dict[str, Any]:
        """Its status as the API server has it. Raises RuntimeError if that does not answer."""
        status: dict[str, Any] = self.tools.get("-n", self.namespace, "tsess", self.name).get("status", {})
        return status

    def wait_serving(self) -> None:
        """Wait as a user would. Raises RuntimeError after 180 s."""
        self.tools.kube(
            "-n", self.namespace, "wait", "--for=condition=Serving", f"tsess/{self.name}", "--timeout=180s", seconds=200
        )

    def pids(self, pod: str) -> list[int]:
        """The machine's numbers of all processes in one of its pods."""
        return self.cluster.container_pids(pod, self.namespace)

    def adapter(self, tinker_path: str) -> dict[str, adapters.Tensor]:
        """The weights of a checkpoint, read from the volume. Raises FileNotFoundError if it is not there."""
        return adapters.read_tensors(adapters.checkpoint_file(self.lineage_root, tinker_path))


def raise_session(
    cluster: Cluster,
    ready: stage.Ready,
    *,
    namespace: str,
    nodes: int,
    say: Callable[[str], None],
    spec: Mapping[str, Any] | None = None,
) -> Session:
    """Start the cluster, install the chart, make a tenant, apply the TrainingSession and wait until it serves.

    Args:
        cluster: not up yet; the caller takes it down, also after a failure.
        ready: what the bootstrap prepared.
        namespace: the tenant's.
        nodes: of the cluster, each with four pretend GPUs.
        say: told of each step before it is taken.
        spec: fields of the TrainingSession's spec that are to differ from the example's.

    Raises:
        RuntimeError: a command failed; the message has what it wrote.
    """
    say(f"starting a control plane and {nodes} nodes with pretend GPUs")
    cluster.up(nodes=nodes, gpus=4, images=ready.images)
    tools = install.Tools(ready.kubectl, ready.helm, cluster.kubeconfig)
    say("installing Everloop: helm install everloop helm/everloop")
    install.install_chart(
        tools, operator_image=stage.OPERATOR_IMAGE, trainer_image=stage.TRAINER_IMAGE, tokenizer=ready.model
    )
    training = cluster.shared / "training"
    training.mkdir(mode=0o777)
    training.chmod(0o777)
    key = install.make_tenant(tools, namespace, training=training, models=ready.model.parent)
    session = Session(cluster, tools, namespace, install.gateway_url(tools), key)
    say("kubectl apply -f examples/trainingsession.yaml")
    changes = json.dumps({"spec": dict(spec or {})})
    patch = ("--local", "-f", str(MANIFEST), "--type=merge", "-p", changes, "-o", "json")
    tools.kube("-n", namespace, "apply", "-f", "-", stdin=tools.kube("patch", *patch))
    session.wait_serving()
    return session
