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

from demo import install
from demo.loop import Loop
from demo.session import Session, raise_session
from devcluster.cluster import Cluster
from tests.prepared import client_python, prepared

NAMESPACE = "team-e2e"
SPEC = {
    "adapters": {"maxModels": 1000},
    "recovery": {"infrastructure": {"maxAttempts": 100, "windowSeconds": 60}, "avoidSeconds": 30},
}
"""Loops make models in each of their rounds, and there are fewer nodes than there are losses of one."""
CLIENTS = Path(__file__).parent / "clients"


@dataclass(frozen=True, slots=True)
class Everloop:
    """A serving session, and the client scripts that use it."""

    session: Session
    directory: Path
    """Of the clients' logs and ledgers."""

    def loop(self, name: str, *arguments: str) -> Loop:
        """The training loop of ``clients/loop.py``, with a ledger ``<name>.ledger``."""
        ledger = str(self.directory / f"{name}.ledger")
        named = ("--base-model", install.BASE_MODEL, "--name", name, "--ledger", ledger)
        return self.script("loop.py", f"{name}.log", (*named, *arguments), self.session.key)

    def script(self, script: str, log: str, arguments: tuple[str, ...], key: str) -> Loop:
        """A client script in the client's environment."""
        python = Path(client_python())
        return Loop(python, CLIENTS / script, self.session.url, key, self.directory / log, arguments)

    def ledger(self, name: str) -> list[dict[str, Any]]:
        """What the loop of this name was told, in order."""
        return [json.loads(line) for line in (self.directory / f"{name}.ledger").read_text().splitlines()]

    def chunk_datums(self) -> int:
        """How many datums the SDK puts in one chunk, as the gateway tells it."""
        request = urllib.request.Request(
            f"{self.session.url}/api/v1/client/config",
            data=b'{"sdk_version": "0.38.0"}',
            headers={"X-API-Key": self.session.key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(json.load(answer)["fwdbwd_max_chunk_len"])

    def client(self, script: str, *arguments: str, key: str | None = None) -> list[str]:
        """Lines printed by a client script that must end well."""
        loop = self.script(script, f"{script}.log", arguments, key or self.session.key)
        loop.start()
        try:
            return list(loop.follow())
        finally:
            loop.stop()


@contextmanager
def installed(nodes: int, root: Path | None = None, **spec: Any) -> Iterator[Everloop]:
    """Cluster up, chart installed, TrainingSession serving; all gone afterwards.

    Without `root`, the directory that is made for it, it has a temporary one. `spec` has further fields of the session.
    """
    if root is None:
        root = Path(tempfile.mkdtemp(prefix="everloop-e2e-"))
    else:
        root.mkdir()
    root.chmod(0o755)
    cluster = Cluster(root)
    try:
        session = raise_session(cluster, prepared(), namespace=NAMESPACE, nodes=nodes, say=print, spec={**SPEC, **spec})
        directory = root / "clients"
        directory.mkdir()
        yield Everloop(session, directory)
    finally:
        cluster.down()
        shutil.rmtree(root)
