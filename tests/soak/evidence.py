"""Keeps what is needed to understand a failure, before its cluster goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from demo import install
from tests.e2e.world import Everloop


def keep(everloop: Everloop, directory: Path) -> None:
    """Copy ledgers, logs of clients, components and pods, the journal and what the API server has into `directory`."""
    session, root = everloop.session, everloop.session.cluster.root
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(everloop.directory, directory / "clients", dirs_exist_ok=True)
    shutil.copytree(session.cluster.layout.logs, directory / "components", dirs_exist_ok=True)
    for logs in (root / "nodes").glob("*/logs"):
        shutil.copytree(logs, directory / "pods" / logs.parent.name, dirs_exist_ok=True, symlinks=True)
    for part in ("journal", "epochs"):
        shutil.copytree(session.lineage_root / part, directory / part, dirs_exist_ok=True)
    with (directory / "journal.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in session.journal())
    for name, question in (
        ("session.yaml", ("-n", session.namespace, "get", "tsess,pods", "-o", "yaml")),
        ("release.yaml", ("-n", install.RELEASE_NAMESPACE, "get", "pods", "-o", "yaml")),
        ("nodes.yaml", ("get", "nodes", "-o", "yaml")),
        ("events.txt", ("get", "events", "-A", "--sort-by=.lastTimestamp")),
    ):
        try:
            text = session.tools.kube(*question)
        except RuntimeError as error:  # the API server may be what failed
            text = str(error)
        (directory / name).write_text(text)
