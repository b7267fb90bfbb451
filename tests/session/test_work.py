"""What a server says of what it has computed: seconds by part, tokens by model and key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop_operator.core.report import MOST_TOKEN_COUNTS, WorkReport
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.usage import Usage
from everloop_trainer.session.work import MOST_PAIRS, Work
from tests.session.world import SAMPLER, A, Client, create, fb, freeze, optim, running, sample, until
from tests.store.crash_files import Disk

KEY = "0123456789ab"


def counts(work: Work) -> list[tuple[str, str, str, int]]:
    return [(each["model"], each["key"], each["kind"], each["count"]) for each in work.to_json()["tokens"]]


def test_who_comes_late_is_counted_with_all_others() -> None:
    """However many models and keys there are; the operator takes as many counts as there can be."""
    work, used = Work(), Usage(trained=1, scored=2, prompt=3, sampled=4)
    for number in range(MOST_PAIRS + 10):
        work.use(f"m-{number:012x}", KEY, used)
    work.use(f"m-{0:012x}", KEY, used)
    told = counts(work)
    assert len(told) == (MOST_PAIRS + 1) * 4 == MOST_TOKEN_COUNTS
    assert [count for model, _, _, count in told if model == "other"] == [30, 40, 20, 10]
    assert [count for model, _, _, count in told if model == f"m-{0:012x}"] == [6, 8, 4, 2]
    assert len(WorkReport.model_validate(work.to_json()).tokens) == MOST_TOKEN_COUNTS


def test_what_took_no_tokens_needs_no_place() -> None:
    """Nor does a kind of which there were none."""
    work = Work()
    work.use("base", KEY, Usage(optimizer=2.0))
    work.use("base", KEY, Usage(sampled=7))
    assert counts(work) == [("base", KEY, "sampled", 7)]
    assert work.to_json()["stepSeconds"]["optimizer"] == "2.000"


async def test_a_loop_is_counted_by_model_and_key() -> None:
    """Once, also where an engine was lost and what it had is computed again."""
    async with running(Disk(), replay_budget=1e6) as world:
        client, service = Client(), world.service
        service.hear(A, KEY)
        await client.play(service, [[create(A)], [fb(A, 1, b"four"), optim(A, 2), freeze(A, 3, 0)]])
        await client.play(service, [[sample(SAMPLER, 0)]])
        world.engine.die()
        await client.play(service, [[fb(A, 4, b"fives")]])
        model = storage_id(A)
        told: dict[str, Any] = service.status().to_json()["work"]
        assert [(each["model"], each["key"], each["kind"], each["count"]) for each in told["tokens"]] == [
            (model, KEY, "prompt", 3),
            (model, KEY, "sampled", 1),
            (model, KEY, "trained", 4 + 5),
        ]
        seconds = {part: float(text) for part, text in told["stepSeconds"].items()}
        assert (seconds["forward"], seconds["backward"], seconds["optimizer"]) == (2.0, 4.0, 0.5)


async def test_what_waits_for_the_engine_is_told_from_what_waits_for_its_turn() -> None:
    """An operation waits from when those before it in its stream have ended until an engine begins it."""
    async with running(Disk()) as world:
        client, service = Client(), world.service
        await client.play(service, [[create(A)]])
        before = service.status().work.step_seconds["wait"]
        gate = world.engine.gate = asyncio.Event()
        for seq in (1, 2):
            await client.send(service, fb(A, seq))
        await until(lambda: ("forward_backward", A, 1) in world.engine.calls)
        world.clock.now += 100
        gate.set()
        await world.settled()
        assert service.status().work.step_seconds["wait"] - before == pytest.approx(0, abs=1)
        world.source.available = False
        world.engine.die()
        await until(lambda: service.status().state == "Recovering")
        await client.send(service, fb(A, 3))
        world.clock.now += 50
        world.source.available = True
        await world.settled()
        assert service.status().work.step_seconds["wait"] - before == pytest.approx(50, abs=1)
