"""With nothing pretended but the GPU: real file system, session pod, gateway and SDK."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everloop_gateway.app import CLIENT_CONFIG
from everloop_operator.api import names, tokens
from everloop_trainer.session.runner import MOST_SAMPLES
from tests.gateway.world import MASTER, Cluster, GatewayProcess, Processes, SdkProcess, Tenant
from tests.networks import new_address
from tests.server import tinymodel
from tests.server.pod import Pod, alive, eventually, process_of

pytestmark = pytest.mark.slow

WHOLE = os.environ.get("EVERLOOP_TEST_WHOLE") == "1"
START_SECONDS = 180.0
MANY_SECONDS = 900.0 if WHOLE else 120.0
MOST_STEPS = 100
EACH = 2048 if WHOLE else 256
"""Samples of each of two client processes that are under way at once."""
FEW_FILES = 400
"""As a process may begin with: too few for so many calls."""

Start = Callable[..., SdkProcess]


class SessionPod(Pod):
    """A session pod that knows a token of the gateway's making."""

    token = ""

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "Authorization": f"Bearer {self.token}"}


@dataclass(frozen=True)
class Real:
    """A session pod that serves, on a file system of its own."""

    pod: Pod
    tenant: Tenant
    volume: Path


@contextmanager
def few_files() -> Iterator[None]:
    """What is started here may have few files open, unless it asks for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own, of 128 MiB."""
    path = tmp_path_factory.mktemp("volume")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[GatewayProcess]:
    """A gateway that begins with few files."""
    processes = Processes()
    with few_files():
        gateway = GatewayProcess(processes, cluster, new_address())
    yield gateway
    processes.stop()


@pytest.fixture(scope="module")
def real(cluster: Cluster, volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """What the operator would have made and told of."""
    place = tmp_path_factory.mktemp("real")
    tinymodel.write_tiny_model(place / "model")
    tenant = cluster.tenant(base_model=tinymodel.NAME)
    pod = SessionPod(place / "pod", new_address(), place / "model", uid=str(uuid.uuid4()))
    pod.token = tokens.session_token(bytes.fromhex(MASTER), tenant.uid, 1)
    (place / "pod" / "token").write_text(pod.token)
    pod.root = volume / "team" / "tiny"
    pod.configure(storage={"root": str(pod.root)})
    with few_files():
        pod.start()
    try:
        eventually(lambda: (pod.status() or {}).get("state") == "Serving", "the pod serves", START_SECONDS)
        told = {"name": "tiny-a1-0", "uid": pod.uid, "ip": pod.ip}
        storage = tenant.storage((pod.status() or {})["lineage"])
        tenant.set_status(phase=names.PHASE_RUNNING, conditions=[], attempt=1, pod=told, storage=storage)
        yield Real(pod, tenant, volume)
    finally:
        pod.end()


@contextmanager
def nothing_computed(pod: Pod) -> Iterator[None]:
    """No operation gets done meanwhile: engine, spare and supervisor stand still, the server does not."""
    engine = (pod.status() or {})["engine"]["pid"]
    still = [pod.container.pid, process_of(pod, "spare"), engine]
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in still:
            if alive(pid):  # one that stood still for too long was killed
                os.kill(pid, signal.SIGCONT)


def waiting(pod: Pod) -> int:
    """Operations that the session has accepted and that have no result."""
    return int((pod.status() or {"waitingOperations": -1})["waitingOperations"])


def test_very_many_samples_are_under_way_at_once(
    cluster: Cluster, gateway: GatewayProcess, real: Real, sdk: Start
) -> None:
    """All are acknowledged before the first result, no call fails, and another key's sample waits for a few of them."""
    assert CLIENT_CONFIG["sample_max_concurrent_requests"] >= 4096  # type: ignore[operator]
    pod = real.pod
    keys = [cluster.key(real.tenant.namespace) for _ in range(3)]
    *greedy, modest = [sdk(gateway.url, key, "many", tinymodel.NAME) for key in keys]
    for program in (*greedy, modest):
        program.wait("ready", seconds=START_SECONDS)
    with nothing_computed(pod):
        for program in greedy:
            program.say(str(EACH))
        eventually(lambda: waiting(pod) == 2 * EACH, "every sample accepted", MANY_SECONDS, every=0.2)
        modest.say("1")
        eventually(lambda: waiting(pod) == 2 * EACH + 1, "another key's sample accepted", MANY_SECONDS, every=0.2)
        journal = pod.journal()
        assert Counter(record["t"] for record in journal if record["t"] in ("accept", "result")) == {
            "accept": 2 * EACH + 1
        }
    for program in (*greedy, modest):
        program.wait("sampled", seconds=MANY_SECONDS)
        program.finish(START_SECONDS)
    first, second = (program.wait("sampled")["tokens"] for program in greedy)
    assert len(first) == EACH
    assert first == second, "a sample depends on its company"
    ended = [record["s"] for record in pod.journal() if record["t"] == "result"]
    assert len(ended) == 2 * EACH + 1
    session = modest.wait("ready")["session_id"]
    before = next(index for index, stream in enumerate(ended) if stream.startswith(session))
    assert before < MOST_SAMPLES, "it waited until all had ended that were in the engine"
    assert gateway.logged("session pod fails") == []


def fill(path: Path) -> None:
    """Leave no page of its file system free."""
    with path.open("wb", buffering=0) as file:
        while free := shutil.disk_usage(path.parent).free:
            file.write(bytes(min(free, 1 << 20)))


def test_a_loop_outlasts_full_storage(cluster: Cluster, gateway: GatewayProcess, real: Real, sdk: Start) -> None:
    """Calls are held while nothing can be written, the pod says why, and with space the loop goes on by itself."""
    pod, key = real.pod, cluster.key(real.tenant.namespace)
    program = sdk(gateway.url, key, "train", tinymodel.NAME)
    model = program.wait("created", seconds=START_SECONDS)["model_id"]
    program.say("step")
    program.wait("step", seconds=START_SECONDS)
    fill(real.volume / "ballast")
    # A record may still fit into the last page of the journal.
    steps = 1 + sum(goes_on(pod, program) for _ in range(MOST_STEPS))
    assert "No space left" in storage_error(pod)
    late = sdk(gateway.url, key, "train", tinymodel.NAME)
    gateway.wait_logged("call waits", "its session pod does not answer (no answer within")
    assert late.events == []
    (real.volume / "ballast").unlink()
    program.wait("step", steps, START_SECONDS)
    late.wait("created", seconds=START_SECONDS)
    for each in (program, late):
        each.finish(START_SECONDS)
    journal = [record for record in pod.journal() if record.get("s") == model]
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
