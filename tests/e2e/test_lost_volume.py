"""A session whose base model comes from S3, whose journal's claim the operator makes, and whose volume is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo import adapters, install
from demo.loop import Loop, loss_of
from demo.session import Session
from everloop_operator.api import names
from tests.copies.store import ACCESS, BUCKET, REGION, SECRET, Store, running
from tests.e2e.waiting import eventually
from tests.e2e.world import CLIENTS, Everloop
from tests.prepared import client_python, prepared

pytestmark = pytest.mark.cluster

NAMESPACE = "team-lost"
NAME = "copied"
STEPS = 4
MODEL = "models/smollm2"


def place_model(store: Store) -> None:
    """The base model as objects, without sending half a gigabyte: the server keeps objects as files."""
    target = store.directory / BUCKET / MODEL
    target.mkdir(parents=True)
    for path in prepared().model.iterdir():
        if not path.name.startswith("."):
            os.link(path, target / path.name) if same_device(path, target) else shutil.copyfile(
                path, target / path.name
            )


def same_device(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev


def objects(everloop: Everloop, store: Store, shared: Path) -> list[dict[str, Any]]:
    """Volumes that wait for the claims to come, the credentials, and the session."""
    cache = shared / "model-cache"
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    journal, _ = install.volume(
        f"{NAME}{names.JOURNAL_CLAIM_SUFFIX}", NAMESPACE, shared / "training", mode="ReadWriteMany"
    )
    endpoint = {"region": REGION, "endpointUrl": store.url, "credentialsSecretName": "s3"}
    return [
        journal,
        *install.volume("model-cache", NAMESPACE, cache, mode="ReadWriteMany"),
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "s3", "namespace": NAMESPACE},
            "stringData": {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET},
        },
        {
            "apiVersion": names.API_VERSION,
            "kind": names.TRAINING_SESSION_KIND,
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": {
                "baseModel": {
                    "name": install.BASE_MODEL,
                    "source": {"s3": {"uri": f"s3://{BUCKET}/{MODEL}", **endpoint}},
                },
                "workers": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
                "storage": {
                    "journal": {"claimTemplate": {"size": "1Gi"}},
                    "copies": {"s3": {"uri": f"s3://{BUCKET}/e2e", **endpoint}},
                    "modelCache": {"claim": {"claimName": "model-cache"}},
                },
            },
        },
    ]


@contextmanager
def raised(everloop: Everloop, store: Store) -> Iterator[Session]:
    """A tenant of its own with that session; gone afterwards, so that its GPU is free."""
    tools, cluster = everloop.session.tools, everloop.session.cluster
    key = install.make_tenant(tools, NAMESPACE, training=cluster.shared / "training", models=prepared().model.parent)
    session = Session(cluster, tools, NAMESPACE, everloop.session.url, key, NAME)
    place_model(store)
    items = objects(everloop, store, cluster.shared)
    tools.kube("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    try:
        try:
            session.wait_serving()
        except RuntimeError as error:
            raise AssertionError(json.dumps(session.status(), indent=1)) from error
        yield session
    finally:
        tools.kube("-n", NAMESPACE, "delete", "tsess", NAME, "--wait=false")


def suspend(session: Session, suspended: bool) -> None:
    change = json.dumps({"spec": {"suspend": suspended}})
    session.tools.kube("-n", NAMESPACE, "patch", "tsess", NAME, "--type=merge", "-p", change)


def lose_claim(session: Session) -> str:
    """The claim goes, with its volume, what is on it and the bindings; an empty volume waits for the next claim.

    Returns its UID.
    """
    tools, claim = session.tools, f"{NAME}{names.JOURNAL_CLAIM_SUFFIX}"
    selector = f"{names.LABEL_TYPE}={names.TYPE_BINDING},{names.LABEL_SESSION}={NAME}"

    def bindings() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = tools.get("-n", NAMESPACE, "configmaps", "-l", selector)["items"]
        return found

    assert bindings()
    before: str = tools.get("-n", NAMESPACE, "pvc", claim)["metadata"]["uid"]
    tools.kube("delete", "pv", f"{NAMESPACE}-{claim}", "--wait=false")
    tools.kube("-n", NAMESPACE, "delete", "pvc", claim)
    shutil.rmtree(session.lineage_root)
    eventually(lambda: not bindings(), "the end of the bindings", 90)
    volume, _ = install.volume(claim, NAMESPACE, session.cluster.shared / "training", mode="ReadWriteMany")
    tools.kube("apply", "-f", "-", stdin=json.dumps(volume))
    return before


def kill_gateways(session: Session) -> None:
    """What they remember is gone; they start again in place."""
    selector = "app.kubernetes.io/component=gateway"
    for pod in session.tools.get("-n", install.RELEASE_NAMESPACE, "pods", "-l", selector)["items"]:
        os.kill(session.cluster.container_pids(pod["metadata"]["name"], install.RELEASE_NAMESPACE)[0], signal.SIGKILL)


def condition(session: Session, kind: str) -> dict[str, Any]:
    return next((c for c in session.status().get("conditions", ()) if c["type"] == kind), {})


def client(everloop: Everloop, session: Session, script: str, *arguments: str) -> list[str]:
    log = everloop.directory / f"lost-{script}.log"
    loop = Loop(Path(client_python()), CLIENTS / script, session.url, session.key, log, arguments)
    loop.start()
    try:
        return list(loop.follow())
    finally:
        loop.stop()


def test_a_volume_that_is_lost_comes_back_from_s3(everloop: Everloop, tmp_path: Path) -> None:
    """Its claim is deleted, too: the checkpoint is there again, bit-equal, and the loop goes on from its old path."""
    with running(tmp_path) as store, raised(everloop, store) as session:
        ledger = everloop.directory / "lost.ledger"
        named = ("--base-model", install.BASE_MODEL, "--steps", str(STEPS), "--name", "kept", "--ledger", str(ledger))
        losses = [loss for line in client(everloop, session, "loop.py", *named) if (loss := loss_of(line)) is not None]
        assert len(losses) == STEPS
        saved = [json.loads(line) for line in ledger.read_text().splitlines()]
        path = next(entry["path"] for entry in saved if entry["event"] == "saved" and entry["step"] == STEPS)
        kept, lineage = adapters.fingerprint(session.adapter(path)), session.status()["storage"]["lineage"]

        def copied() -> bool:
            storage = session.status()["storage"]
            return storage["pendingCopies"] == 0 and any(
                key.endswith("manifest.json") and json.loads(store.content(key)).get("name") == "kept"
                for key in store.objects("e2e")
            )

        eventually(copied, "a copy of the checkpoint", 90)
        assert condition(session, names.CONDITION_COPIES_CURRENT)["status"] == "True"
        suspend(session, True)
        eventually(lambda: session.status()["phase"] == "Suspended", "the pod's end", 90)
        lost = lose_claim(session)
        kill_gateways(session)
        suspend(session, False)
        session.wait_serving()
        storage = session.status()["storage"]
        assert (storage["lineage"], storage["claimUID"] != lost) == (lineage, True)
        assert adapters.fingerprint(session.adapter(path)) == kept
        again, trained = client(everloop, session, "resume.py", "--path", path, "--name", "again")
        assert adapters.fingerprint(session.adapter(again)) == kept
        assert trained.startswith("loss ")
        model = path.removeprefix("tinker://").partition("/")[0]
        assert [r["t"] for r in session.journal() if r.get("s") == model] == ["restored"]
