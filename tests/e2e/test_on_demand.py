"""A namespace without a TrainingSession: the user's script is all that there is, and it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo import install
from demo.install import Tools
from demo.loop import Loop, loss_of
from everloop_gateway.catalogue import session_name
from everloop_operator.api import names
from tests.e2e.waiting import eventually
from tests.e2e.world import CLIENTS, Everloop
from tests.prepared import client_python, prepared

pytestmark = pytest.mark.cluster

NAMESPACE = "team-on-demand"
STEPS = 3


def test_a_script_alone_brings_up_its_session_and_trains(everloop: Everloop) -> None:
    """create_lora_training_client waits for a session that nobody has applied; its binding goes with the claim only."""
    tools, directory = everloop.session.tools, everloop.directory
    volume = everloop.session.cluster.shared / "training"
    key = install.make_tenant(tools, NAMESPACE, training=volume, models=prepared().model.parent)
    install.allow_sessions(tools, NAMESPACE)
    assert tools.get("-n", NAMESPACE, "tsess")["items"] == []
    ledger = ("--name", "on-demand", "--ledger", str(directory / "on-demand.ledger"))
    arguments = ("--base-model", install.BASE_MODEL, "--steps", str(STEPS), "--length", "16", *ledger)
    python, log = Path(client_python()), directory / "on-demand.log"
    loop = Loop(python, CLIENTS / "loop.py", everloop.session.url, key, log, arguments)
    loop.start()
    try:
        losses = [loss for line in loop.follow() if (loss := loss_of(line)) is not None]
    finally:
        loop.stop()
    assert len(losses) == STEPS
    (made,) = tools.get("-n", NAMESPACE, "tsess")["items"]
    name = session_name(install.BASE_MODEL, 1)
    assert (made["metadata"]["name"], made["metadata"]["labels"][names.LABEL_CREATED_BY]) == (name, "gateway")
    assert made["status"]["phase"] == names.PHASE_RUNNING
    assert (volume / NAMESPACE / name / "identity.json").exists()
    bound = bindings(tools)
    kinds = {item["metadata"]["labels"][names.LABEL_TYPE] for item in bound}
    assert kinds == {names.TYPE_BINDING, names.TYPE_LINEAGE}
    tools.kube("-n", NAMESPACE, "delete", "tsess", name)
    eventually(lambda: tools.get("-n", NAMESPACE, "pods")["items"] == [], "the session's pod collected")
    assert bindings(tools) == bound
    tools.kube("-n", NAMESPACE, "delete", "pvc", "training")
    eventually(lambda: bindings(tools) == [], "the binding collected")


def bindings(tools: Tools) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_TYPE} in ({names.TYPE_BINDING},{names.TYPE_LINEAGE})"
    found = tools.get("-n", NAMESPACE, "configmaps", "-l", selector)["items"]
    return sorted(found, key=lambda item: str(item["data"].get("id", "")))
