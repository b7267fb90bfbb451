"""Operations in which engines die: alone after three deaths, failed after three more, and never for others' deaths."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.poison import Tries
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    SESSION,
    A,
    B,
    Client,
    Over,
    Running,
    create,
    fb,
    freeze,
    optim,
    running,
    sample,
    states,
    until,
)
from tests.store.crash_files import CrashFiles, Died, Disk

LIMIT = 3
"""Deaths that its server saw after which an operation runs alone; after as many more it fails."""
START = [[create(A), create(B, rank=8)], [fb(A, 1, b"a1"), fb(B, 1, b"b1"), optim(B, 2)]]


def test_a_death_that_took_its_server_along_counts_half() -> None:
    """Three deaths that a server saw, or six pods: alone. As many again: it fails."""
    seen = Tries()
    for died in range(2 * LIMIT):
        assert seen.verdict(1) == ("innocent" if died < LIMIT else "suspected")
        seen = seen.tried(1)
    assert seen.verdict(1) == "condemned"
    taken = Tries()
    for died in range(4 * LIMIT):
        assert taken.verdict(died + 1) == ("innocent" if died < 2 * LIMIT else "suspected")
        taken = taken.tried(died + 1)
    assert taken.verdict(4 * LIMIT + 1) == "condemned"
    mixed = Tries().tried(1).tried(1).tried(1)
    assert (mixed.verdict(1), mixed.verdict(2)) == ("suspected", "innocent"), "one of them is not known to be a death"
    assert (mixed.tried(2).verdict(2), mixed.tried(2).passed_alone) == ("suspected", False)


def tried_by(engine: FakeEngine, model: str, seq: int) -> bool:
    return any(call[1:] == (model, seq) for call in engine.calls)


async def test_a_deadly_operation_fails_and_the_stream_goes_on() -> None:
    """Six engines, the last three with its model only; then its window fails, and the step after that counts."""
    client = Client()
    async with running(Disk(), replay_budget=1e9) as world:
        await client.play(world.service, START)
        await asyncio.gather(*(client.send(world.service, op) for op in (fb(A, 2, b"poison"), optim(A, 3))))
        failed = await client.ask(world.service, f"{A}:2")
        assert isinstance(failed, Failed)
        assert failed.category == "server"
        assert failed.error.startswith("forward_backward: the training engine, or its whole pod, died each time")
        step = await client.ask(world.service, f"{A}:3")
        assert isinstance(step, Failed)
        assert "operation 2 of this accumulation window failed" in step.error
        victims = [engine for engine in world.source.engines if tried_by(engine, A, 2)]
        assert len(victims) == 2 * LIMIT
        assert [sorted(engine.models) for engine in victims] == [[A, B]] * 3 + [[A]] * 3
        await client.play(world.service, [[fb(A, 4, b"a4"), optim(A, 5)], [fb(B, 3, b"b3"), optim(B, 4)]])
        await world.settled()
        adapters = {model: json.loads(state) for model, state in states(world.engine).items()}
        assert (adapters[A]["applied"], adapters[B]["applied"]) == ([5], [2, 4])
        assert world.service.status().replay_mismatches == 0


async def test_what_passes_alone_is_not_run_beside_others_again() -> None:
    """An operation too large beside another model passes alone; a snapshot spares later engines from it."""
    client = Client()
    async with running(Disk(), replay_budget=1e9) as world:
        await client.play(world.service, START)
        await client.play(world.service, [[fb(A, 2, b"large"), optim(A, 3), fb(B, 3, b"b3")]])
        await world.settled()
        victims = [engine for engine in world.source.engines if tried_by(engine, A, 2)]
        assert [sorted(engine.models) for engine in victims] == [[A, B]] * 3 + [[A]]
        assert {call[0] for call in victims[-1].calls} == {"init", "forward_backward", "snapshot"}
        assert json.loads(states(world.engine)[A])["applied"] == [3]
        world.engine.die()
        await until(
            lambda: (
                world.service.status().recoveries[-1].reason == "EngineLost"
                and world.service.status().state == "Serving"
            )
        )
        await world.settled()
        assert json.loads(states(world.engine)[A])["applied"] == [3]


async def test_a_deadly_sample_fails_and_its_session_goes_on() -> None:
    """Samples are unordered: those behind a deadly one need not wait for its end."""

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "sample" and not deadly.done():
            engine.die()

    deadly: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sampler, client = f"{SESSION}:sample:0", Client()
    async with running(Disk(), hook=hook) as world:
        await client.play(world.service, [[create(A)], [freeze(A, 1, 0)]])
        outcome = await client.ask_after(world.service, sample(sampler, 0))
        assert isinstance(outcome, Failed)
        assert outcome.error.startswith("sample: the training engine, or its whole pod, died each time")
        deadly.set_result(None)
        assert isinstance(await client.ask_after(world.service, sample(sampler, 1)), Succeeded)


async def test_deaths_are_counted_over_restarts() -> None:
    """Each pod sees two engines die and is killed during the third try: the third pod sees the sixth death."""
    disk, client, told = Disk(), Client(), []
    operation = fb(A, 1, b"poison")
    for attempt in (1, 2, 3):
        tries = itertools.count(1)

        def hook(engine: FakeEngine, op: str, tries: itertools.count[int] = tries) -> None:
            if op == "forward_backward" and next(tries) == 3:
                engine.gate = asyncio.Event()  # hangs in it until the pod is killed

        async with running(disk, attempt=attempt, pod=f"p{attempt}", hook=hook) as world:
            await client.send(world.service, create(A))
            await client.send(world.service, operation)
            await until(lambda: world.source.engines != [] and (world.engine.gate is not None or ended(world, A) == 1))
            outcome = await world.service.outcome(operation.request_id, 0)
            told.append(outcome.reason.partition(":")[0] if isinstance(outcome, Pending) else outcome)
    assert told[:2] == ["running", "running alone"]
    assert isinstance(told[2], Failed)


def ended(world: Running, model: str) -> int:
    """The last number of a model that has ended, or -1."""
    return next((found.seq for found in world.service.status().models if found.model_id == model), -1)


async def killed_in(disk: Disk, client: Client, attempt: int) -> bool:
    """A pod ends while it runs the operation; returns whether it ran alone. Raises AssertionError if it did not run."""

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "forward_backward":
            engine.gate = asyncio.Event()

    async with running(disk, attempt=attempt, pod=f"p{attempt}", hook=hook) as world:
        await client.play(world.service, [[create(A), create(B)]])
        await client.send(world.service, fb(A, 1))
        await until(lambda: world.source.engines != [] and world.engine.gate is not None)
        outcome = await world.service.outcome(f"{A}:1", 0)
        assert isinstance(outcome, Pending)
        assert outcome.reason.startswith("running")
        return sorted(world.engine.models) == [A]


async def test_pods_killed_from_outside_fail_nothing() -> None:
    """Eleven pods in a row end in the same operation, from the seventh on it runs alone; then it runs to its end."""
    disk, client = Disk(), Client()
    alone = [await killed_in(disk, client, attempt) for attempt in range(1, 4 * LIMIT)]
    assert alone == [False] * 2 * LIMIT + [True] * (2 * LIMIT - 1)
    async with running(disk, attempt=4 * LIMIT, pod="last") as world:
        assert isinstance(await client.ask_after(world.service, fb(A, 1)), Succeeded)


async def test_an_operation_that_takes_each_pod_along_fails_at_last() -> None:
    """Lack of memory kills the server with its engine: after twelve pods the operation fails and the stream goes on."""
    disk, client = Disk(), Client()
    for attempt in range(1, 4 * LIMIT + 1):
        await killed_in(disk, client, attempt)
    async with running(disk, attempt=4 * LIMIT + 1, pod="last") as world:
        outcome = await client.ask_after(world.service, fb(A, 1))
        assert isinstance(outcome, Failed)
        assert (outcome.category, "or its whole pod, died each time" in outcome.error) == ("server", True)
        assert isinstance(await client.ask_after(world.service, fb(A, 2)), Succeeded)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_death_at_every_write_around_a_deadly_operation(after: bool) -> None:
    """Whatever write the server dies at, the deadly operation ends as it ends in an unbroken run."""
    loop = [*START, [fb(A, 2, b"poison"), optim(A, 3)], [fb(B, 3, b"large"), optim(B, 4), fb(A, 4), optim(A, 5)]]
    files, unbroken = CrashFiles(Disk()), Client()
    async with running(files.disk, files=files) as world:
        await unbroken.play(world.service, loop)
        await world.settled()
        adapters, effects = states(world.engine), files.effects
    for die_at in range(1, effects + 1):
        disk, client = Disk(), Client()
        try:
            async with running(disk, files=CrashFiles(disk, die_at=die_at, after=after)) as world:
                await client.play(world.service, loop)
        except (*Over, Died):
            pass
        async with running(disk, attempt=2, pod="pod-2") as world:
            await client.play(world.service, loop)
            await world.settled()
            assert (states(world.engine), client.told) == (adapters, unbroken.told)
