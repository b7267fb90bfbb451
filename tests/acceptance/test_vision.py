"""The promise for images: an unmodified program trains and samples on them while engine and server are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop_trainer.session.records import Result, Try
from tests.networks import new_address
from tests.server import tinyvision
from tests.server.pod import Pod, eventually, kill_process, process_of
from tests.server.sdk import SdkProgram
from tests.server.stub import Stub, serving
from tests.server.test_survival import adapter, assert_equal_states, history, model_of, shoot
from tests.whole import only_whole

pytestmark = only_whole
STEPS = 6
LOOP = {"seed": 17, "steps": STEPS, "sequences": 24, "samples": 12}


class SeeingProgram(SdkProgram):
    """`sdk_vision.py` as a process."""

    @staticmethod
    def command() -> list[str]:
        return [SdkProgram.command()[0], "-m", "tests.server.sdk_vision"]


@pytest.fixture(scope="module")
def seeing_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A pod whose base model takes images."""
    place = tmp_path_factory.mktemp("seeing")
    tinyvision.write_tiny_seeing_model(place / "model")
    pod = Pod(place / "pod", new_address(), place / "model")
    pod.configure(baseModel={"name": tinyvision.NAME, "revision": "r1", "path": str(place / "model")})
    pod.start()
    pod.wait_until("Serving")
    yield pod
    pod.end()


@pytest.fixture(scope="module")
def gateway(seeing_pod: Pod) -> Iterator[Stub]:
    """A stub gateway before it."""
    with serving(seeing_pod, new_address(), {}) as stub:
        yield stub


def _sampling(pod: Pod) -> int | None:
    """An engine that has samples and no result of them all."""
    open_tries: dict[tuple[str, int], int] = {}
    for record in history(pod):
        if isinstance(record, Try) and ":sample:" in record.stream:
            open_tries[record.stream, record.seq] = record.engine
        elif isinstance(record, Result):
            open_tries.pop((record.stream, record.seq), None)
    return next(iter(open_tries.values()), None)


def _told(program: SdkProgram, *events: str) -> list[dict[str, Any]]:
    return [event for event in program.events if event["event"] in events]


def test_training_and_sampling_on_images_outlive_engine_and_server(
    seeing_pod: Pod, gateway: Stub, tmp_path: Path
) -> None:
    """Same losses, same samples with the same log-probabilities, and the same adapter, as nobody had been killed."""
    with SeeingProgram(gateway.url, "train", **LOOP) as program:
        program.finish()
    unbroken = program
    expected = adapter(seeing_pod, model_of(program))
    status = seeing_pod.status()
    assert status is not None
    before = status["engine"]["restarts"]
    begin = tmp_path / "begin"
    with SeeingProgram(gateway.url, "train", **LOOP, until=str(begin)) as program:
        shoot(seeing_pod, program, 1, lambda _pod, engine: engine)
        shoot(seeing_pod, program, 3, lambda pod, _engine: process_of(pod, "server"))
        eventually(lambda: program.named("sampling"), "samples are next", 120)
        begin.touch()
        kill_process(eventually(lambda: _sampling(seeing_pod), "a sample runs", 30, every=0.002))
        program.finish()
    (refused,) = program.named("refused")
    assert refused["category"] == "user"
    assert "data[1].model_input.chunks[2].data: not a whole png image" in refused["message"]
    kinds = ("step", "sampled", "scored")
    assert _told(program, *kinds) == _told(unbroken, *kinds)
    assert_equal_states(adapter(seeing_pod, model_of(program)), expected)
    status = seeing_pod.status()
    assert status is not None
    assert status["replayMismatches"] == 0
    assert status["engine"]["restarts"] > before or status["incarnation"]["boot"] > 1
    tries = [record for record in history(seeing_pod) if isinstance(record, Try) and ":sample:" in record.stream]
    again = {(each.stream, each.seq) for each in tries}
    assert len(tries) > len(again), "no sample was begun twice"
    scored = program.named("scored")[0]["logprobs"]
    assert len(scored) == program.named("sampled")[0]["length"]
    assert scored.count(None) > 1
    assert all(
        token not in (tinyvision.IMAGE, tinyvision.VIDEO)
        for each in program.named("sampled")
        for row in each["tokens"]
        for token in row
    )
