"""Gateway and session pod as processes of this machine, with a real API server and no cluster.

Every hop of an operation is there: the SDK or raw HTTP, the gateway, the server with its journal on a disk, the engine.
What is left out is what takes no part in an operation: scheduler, kubelet, container runtime, operator.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everloop_operator.api import names, tokens
from tests.bench.driven import PROGRAMS, Driven
from tests.gateway.world import (
    GATEWAY_TOKEN,
    GATEWAY_USER,
    MASTER,
    Cluster,
    GatewayProcess,
    Processes,
    Tenant,
    wait_for,
)
from tests.networks import new_address
from tests.operator import control_plane
from tests.prepared import base_model, client_python
from tests.server.pod import Pod

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
THREADS = 1
ATTEMPT = 1
LONGEST_SEQUENCE = 2048
START_SECONDS = 120.0


@dataclass(frozen=True)
class Stack:
    """What serves, and a key for it."""

    cluster: Cluster
    tenant: Tenant
    gateway: GatewayProcess
    pod: Pod
    key: str
    base_model: str

    def loop(self, batch: int, length: int, rank: int) -> Driven:
        """`tinker_loop.py` through the gateway, ready to make steps."""
        return self._driven("tinker_loop.py", batch, length, rank)

    def samples(self, prompt: int, completion: int) -> Driven:
        """`tinker_samples.py` through the gateway, ready to sample."""
        return self._driven("tinker_samples.py", prompt, completion)

    def _driven(self, program: str, *numbers: int) -> Driven:
        command = [client_python(), str(PROGRAMS / program), self.base_model, *map(str, numbers)]
        environment = {
            "TINKER_BASE_URL": self.gateway.url,
            "TINKER_API_KEY": self.key,
            "HOME": str(self.pod.directory),
            "PATH": os.environ["PATH"],
        }
        return Driven(command, environment, self.pod.directory / "loop.log")


@contextmanager
def serving(
    place: Path,
    name: str = MODEL,
    weights: Path | None = None,
    longest: int = LONGEST_SEQUENCE,
    prepare: Callable[[Pod], None] = lambda _: None,
    address: Callable[[Pod], str] = lambda pod: pod.ip,
) -> Iterator[Stack]:
    """All of it up and the session serving; gone afterwards.

    Args:
        place: an empty directory on the disk that is to be measured.
        name: of the base model.
        weights: its directory; None for SmolLM2-135M-Instruct.
        longest: sequence in tokens, at most what the base model takes.
        prepare: changes the pod's settings before it starts.
        address: where the gateway is told that the pod is.
    """
    processes = Processes()
    (place / "plane").mkdir()
    with control_plane.running(place / "plane", (f"{GATEWAY_TOKEN},{GATEWAY_USER},2",)) as plane:
        cluster = Cluster(plane, place)
        tenant = cluster.tenant("bench", name)
        token = tokens.session_token(bytes.fromhex(MASTER), tenant.uid, ATTEMPT)
        pod = make_pod(place / "pod", name, weights or base_model(), token, longest)
        prepare(pod)
        try:
            pod.start()
            pod.wait_until("Serving", START_SECONDS)
            where = {"name": "bench-a1-0", "uid": pod.uid, "ip": address(pod)}
            storage = tenant.storage((pod.status() or {})["lineage"])
            tenant.set_status(phase=names.PHASE_RUNNING, conditions=[], attempt=ATTEMPT, pod=where, storage=storage)
            gateway = GatewayProcess(processes, cluster, new_address(), log_level="INFO")
            key = cluster.key(tenant.namespace)
            with gateway.client(key) as client:
                wait_for("the key", lambda: client.post("/client/config").status_code == 200)
            yield Stack(cluster, tenant, gateway, pod, key, name)
        finally:
            pod.end()
            processes.stop()
            cluster.api.close()


def make_pod(directory: Path, name: str, weights: Path, token: str, longest: int) -> Pod:
    """A session pod, not started, with the settings that a TrainingSession has by default."""
    pod = Pod(directory, new_address(), weights, uid=str(uuid.uuid4()), token=token)
    pod.configure(
        baseModel={"name": name, "revision": "", "path": str(weights)},
        engine={"dtype": "Float32", "threads": THREADS, "deterministic": True, "maxSequenceLength": longest},
        adapters={"maxModels": 16, "maxRank": 128},
        snapshots={"replayBudgetSeconds": 20.0},
        checkpoints={"everySeconds": 1800.0, "keepLast": 2},
    )
    return pod
