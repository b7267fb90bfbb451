"""One running session pod for all tests that do not break it; those that do start their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.networks import new_address
from tests.server.pod import Pod
from tests.server.stub import Stub, serving
from tests.server.tinymodel import write_tiny_model
from tests.server.wire import Wire


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a base model of 2 layers."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def make_pod(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pod]]:
    """Makes pods, not started; each that runs at the end is stopped."""
    pods: list[Pod] = []

    def make(**options: object) -> Pod:
        directory = tmp_path_factory.mktemp("pod")
        pods.append(Pod(directory, new_address(), tiny_model, **options))  # type: ignore[arg-type]
        return pods[-1]

    yield make
    for pod in pods:
        pod.end()


@dataclass(frozen=True)
class HeldPoll:
    """A poll of an operation that cannot run, since its pod has no engine."""

    pod: Pod
    request_id: str
    begun: float
    answer: Future[tuple[httpx.Response, float]]


@pytest.fixture(scope="session")
def held_poll(make_pod: Callable[..., Pod]) -> Iterator[HeldPoll]:
    """Begun early, because it takes as long as the server holds a poll, and asked for late."""
    pod = make_pod()
    pod.start("server")
    pod.wait_until("Starting")
    wire = Wire(pod)

    def poll() -> tuple[httpx.Response, float]:
        return wire.retrieve(request_id), time.monotonic()

    with wire.client, ThreadPoolExecutor(1) as pool:
        request_id = wire.create_model().json()["request_id"]
        begun = time.monotonic()
        yield HeldPoll(pod, request_id, begun, pool.submit(poll))
        pod.end()


@pytest.fixture(scope="session")
def pod(make_pod: Callable[..., Pod], held_poll: HeldPoll) -> Pod:
    """A pod that serves."""
    pod = make_pod()
    pod.start()
    pod.wait_until("Serving")
    return pod


@pytest.fixture(scope="session")
def stub(pod: Pod) -> Iterator[Stub]:
    """A stub gateway before `pod`, with chunks of two datums."""
    with serving(pod, new_address(), {"fwdbwd_max_chunk_len": 2}) as stub:
        yield stub


@pytest.fixture(scope="module")
def own_pod(make_pod: Callable[..., Pod]) -> Pod:
    """A pod of one file of tests, to be shot at."""
    pod = make_pod()
    pod.start()
    pod.wait_until("Serving")
    return pod


@pytest.fixture(scope="module")
def gateway(own_pod: Pod) -> Iterator[Stub]:
    """A stub gateway before `own_pod`."""
    with serving(own_pod, new_address(), {}) as stub:
        yield stub
