"""Storage that is full, with nothing pretended but the GPU: real file system, session pod, gateway and SDK."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import names, tokens
from tests.gateway.world import MASTER, Cluster, GatewayProcess, SdkProcess
from tests.networks import new_address
from tests.server import tinymodel
from tests.server.pod import Pod, eventually

pytestmark = pytest.mark.slow

START_SECONDS = 180.0
MOST_STEPS = 100


class SessionPod(Pod):
    """A session pod that knows a token of the gateway's making."""

    token = ""

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "Authorization": f"Bearer {self.token}"}


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 128 MiB."""
    path = tmp_path / "volume"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    """Leave no page of its file system free."""
    with path.open("wb", buffering=0) as file:
        while free := shutil.disk_usage(path.parent).free:
            file.write(bytes(min(free, 1 << 20)))


def test_a_loop_outlasts_full_storage(
    cluster: Cluster, gateway: GatewayProcess, volume: Path, tmp_path: Path, sdk: Callable[..., SdkProcess]
) -> None:
    """Calls are held while nothing can be written, the pod says why, and with space the loop goes on by itself."""
    tinymodel.write_tiny_model(tmp_path / "model")
    tenant = cluster.tenant(base_model=tinymodel.NAME)
    pod = SessionPod(tmp_path / "pod", new_address(), tmp_path / "model", uid=str(uuid.uuid4()))
    pod.token = tokens.session_token(bytes.fromhex(MASTER), tenant.uid, 1)
    (tmp_path / "pod" / "token").write_text(pod.token)
    pod.root = volume / "team" / "tiny"
    pod.configure(storage={"root": str(pod.root)})
    pod.start()
    try:
        eventually(lambda: (pod.status() or {}).get("state") == "Serving", "the pod serves", START_SECONDS)
        place = {"name": "tiny-a1-0", "uid": pod.uid, "ip": pod.ip}
        storage = tenant.storage((pod.status() or {})["lineage"])
        tenant.set_status(phase=names.PHASE_RUNNING, conditions=[], attempt=1, pod=place, storage=storage)
        key = cluster.key(tenant.namespace)
        program = sdk(gateway.url, key, "train", tinymodel.NAME)
        model = program.wait("created", seconds=START_SECONDS)["model_id"]
        program.say("step")
        program.wait("step", seconds=START_SECONDS)
        fill(volume / "ballast")
        # A record may still fit into the last page of the journal.
        steps = 1 + sum(goes_on(pod, program) for _ in range(MOST_STEPS))
        assert "No space left" in storage_error(pod)
        late = sdk(gateway.url, key, "train", tinymodel.NAME)
        gateway.wait_logged("call waits", "its session pod does not answer (no answer within")
        assert late.events == []
        (volume / "ballast").unlink()
        program.wait("step", steps, START_SECONDS)
        late.wait("created", seconds=START_SECONDS)
        for each in (program, late):
            each.finish(START_SECONDS)
        journal = [record for record in pod.journal() if record.get("s") == model]
    finally:
        pod.end()
    for kind in ("accept", "result"):
        numbers = Counter(record["n"] for record in journal if record["t"] == kind)
        assert numbers == Counter(range(2 * steps + 2)), kind


def goes_on(pod: Pod, program: SdkProcess) -> bool:
    """Ask for a step, unless the pod says that it cannot write: was it asked for?"""
    if storage_error(pod):
        return False
    wanted = len(program.named("step")) + 1
    program.say("step")
    eventually(lambda: storage_error(pod) or len(program.named("step")) >= wanted, "a step, or none", 60)
    return True


def storage_error(pod: Pod) -> str:
    """Why the pod says that it cannot write; empty while it does not say so."""
    status: dict[str, Any] = pod.status() or {}
    return str((status.get("storage") or {}).get("error") or "")
