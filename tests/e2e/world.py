"""An installation of Everloop on a local cluster, and what a user of it has."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap import stage
from demo import adapters, install
from demo.loop import Loop
from devcluster.cluster import Cluster
from everloop_trainer.store.dump import dump
from tests.prepared import prepared

NAMESPACE, SESSION = "team-e2e", "smollm2"
CLIENTS = Path(__file__).parent / "clients"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Everloop:
    """A running installation: the cluster, its command line, and what a user of it has."""

    cluster: Cluster
    tools: install.Tools
    ready: stage.Ready
    url: str
    key: str
    directory: Path

    @property
    def lineage_root(self) -> Path:
        return self.cluster.shared / "training" / NAMESPACE / SESSION

    def journal(self) -> list[dict[str, Any]]:
        return list(dump(self.lineage_root))

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.tools.get("-n", NAMESPACE, "tsess", SESSION).get("status", {})
        return status

    def wait_serving(self) -> None:
        self.tools.kube(
            "-n", NAMESPACE, "wait", "--for=condition=Serving", f"tsess/{SESSION}", "--timeout=180s", seconds=200
        )

    def loop(self, name: str, *arguments: str) -> Loop:
        """The training loop of ``clients/loop.py``, with a ledger ``<name>.ledger``."""
        ledger = str(self.directory / f"{name}.ledger")
        named = ("--base-model", install.BASE_MODEL, "--name", name, "--ledger", ledger)
        return self.script("loop.py", f"{name}.log", (*named, *arguments), self.key)

    def script(self, script: str, log: str, arguments: tuple[str, ...], key: str) -> Loop:
        """A client script in the client's environment."""
        return Loop(self.ready.client_python, CLIENTS / script, self.url, key, self.directory / log, arguments)

    def ledger(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / f"{name}.ledger").read_text().splitlines()]

    def chunk_datums(self) -> int:
        """How many datums the SDK puts in one chunk, as the gateway tells it."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/client/config",
            data=b'{"sdk_version": "0.38.0"}',
            headers={"X-API-Key": self.key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(json.load(answer)["fwdbwd_max_chunk_len"])

    def client(self, script: str, *arguments: str, key: str | None = None) -> list[str]:
        """Lines printed by a client script that must end well."""
        loop = self.script(script, f"{script}.log", arguments, key or self.key)
        loop.start()
        try:
            return list(loop.follow())
        finally:
            loop.stop()

    def adapter(self, name: str, step: int) -> dict[str, adapters.Tensor]:
        """The weights that the loop of this name saved after a step, read from the session's volume."""
        saved = next(e["path"] for e in self.ledger(name) if e["event"] == "saved" and e["step"] == step)
        return adapters.read_tensors(adapters.checkpoint_file(self.lineage_root, saved))


@contextmanager
def installed(nodes: int) -> Iterator[Everloop]:
    """Cluster up, chart installed, TrainingSession serving; all gone afterwards."""
    ready = prepared()
    root = Path(tempfile.mkdtemp(prefix="everloop-e2e-"))
    root.chmod(0o755)
    cluster = Cluster(root)
    try:
        cluster.up(nodes=nodes, gpus=4, images=ready.images)
        tools = install.Tools(ready.kubectl, ready.helm, cluster.kubeconfig)
        install.install_chart(
            tools, operator_image=stage.OPERATOR_IMAGE, trainer_image=stage.TRAINER_IMAGE, tokenizer=ready.model
        )
        training = cluster.shared / "training"
        training.mkdir(mode=0o777)
        training.chmod(0o777)
        key = install.make_tenant(tools, NAMESPACE, training=training, models=ready.model.parent)
        tools.kube("-n", NAMESPACE, "apply", "-f", str(REPOSITORY / "examples" / "trainingsession.yaml"))
        directory = root / "clients"
        directory.mkdir()
        running = Everloop(cluster, tools, ready, install.gateway_url(tools), key, directory)
        running.wait_serving()
        yield running
    finally:
        cluster.down()
        shutil.rmtree(root)
