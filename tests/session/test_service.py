"""Accepting, waiting, telling: what a client sees of one incarnation."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable

import pytest

from everloop_trainer.session import service
from everloop_trainer.session.errors import EngineRefused, Fenced, StorageFailed
from everloop_trainer.session.operations import CreateModel, Operation, Refused
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded, Unknown
from everloop_trainer.session.records import Deliver
from everloop_trainer.session.service import SessionService
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import claim
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    SESSION,
    TIME,
    A,
    B,
    Client,
    create,
    fb,
    freeze,
    optim,
    running,
    sample,
    save,
    states,
    until,
)
from tests.store.crash_files import CrashFiles, Disk


async def test_results_are_what_the_sdk_parses() -> None:
    """The JSON bodies carry the fields of the SDK's response models."""
    client = Client()
    async with running(Disk()) as world:
        steps = [
            [create(A)],
            [fb(A, 1)],
            [optim(A, 2)],
            [save(A, 3, "n")],
            [freeze(A, 4, None, "n")],
            [freeze(A, 5, 3)],
        ]
        await client.play(world.service, steps)
    bodies = [client.told[f"{A}:{seq}"] for seq in range(6)]
    assert all(isinstance(body, Succeeded) for body in bodies)
    assert bodies[1] == Succeeded("application/x-protobuf", bodies[1].body)  # type: ignore[union-attr]
    decoded = [json.loads(bodies[seq].body) for seq in (0, 2, 3, 4, 5)]  # type: ignore[union-attr]
    assert decoded[0] == {"model_id": A, "type": "create_model"}
    assert decoded[1]["metrics"].keys() == {"norm"}
    assert decoded[2] == {"path": f"tinker://{A}/weights/n", "type": "save_weights"}
    assert decoded[3] == {"path": f"tinker://{A}/sampler_weights/n", "type": "save_weights_for_sampler"}
    assert decoded[4] == {"sampling_session_id": f"{SESSION}:sample:3", "type": "save_weights_for_sampler"}


async def test_an_operation_is_acknowledged_only_when_durable() -> None:
    """Neither the first submit nor a repeat of it returns while the flush is under way; nothing runs before it."""
    async with running(Disk()) as world:
        await world.settled()
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        world.files.on_flush = stall
        first = asyncio.create_task(world.service.accept(create(A)))
        await asyncio.to_thread(started.wait, 10)
        repeat = asyncio.create_task(world.service.accept(create(A, rank=9)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert not repeat.done()
        assert world.engine.calls == []
        go.set()
        world.files.on_flush = None
        await asyncio.gather(first, repeat)
        await world.service.outcome(f"{A}:0", 10)
        assert world.engine.models[A].lora["rank"] == 4  # the first body won


async def test_a_cancelled_submit_does_not_undo_the_acceptance() -> None:
    """A client that hangs up while the flush runs finds its operation accepted when it comes again."""
    async with running(Disk()) as world:
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        world.files.on_flush = stall
        first = asyncio.create_task(world.service.accept(create(A)))
        await asyncio.to_thread(started.wait, 10)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        world.files.on_flush = None
        go.set()
        await world.service.accept(create(A))
        assert isinstance(await world.service.outcome(f"{A}:0", 10), Succeeded)


async def test_repeats_get_the_first_answer_and_run_nothing() -> None:
    """A number that was taken is never run again, whatever its repeat says."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1, b"x"), optim(A, 2)]])
        calls = list(world.engine.calls)
        await client.play(world.service, [[fb(A, 1, b"other"), fb(A, 2)], [create(A, rank=5)]])
        assert world.engine.calls == calls


async def test_unknown_requests() -> None:
    """What was never accepted is unknown, whatever it looks like."""
    async with running(Disk()) as world:
        for request in (f"{A}:0", "nonsense", f"{A}:x", ""):
            assert await world.service.outcome(request, 0) == Unknown()


async def test_pending_tells_why() -> None:
    """While there is no engine, while a number is missing, while others run first."""
    async with running(Disk(), available=False) as world:
        await world.service.accept(create(A))
        outcome = await world.service.outcome(f"{A}:0", 0.01)
        assert isinstance(outcome, Pending)
        assert outcome.queue_state == "paused_capacity"
        assert world.service.status().state == "Starting"
        world.source.gate = asyncio.Event()
        world.source.available = True
        await world.service.accept(fb(A, 2))
        await world.service.accept(create(B))
        await until(lambda: bool(world.source.engines) and bool(world.engine.calls))
        assert await world.service.outcome(f"{A}:0", 0.01) == Pending("active", "running", 0)
        second = await world.service.outcome(f"{B}:0", 0.01)
        assert isinstance(second, Pending)
        assert second.position == 2
        world.source.gate.set()
        assert isinstance(await world.service.outcome(f"{A}:0", 10), Succeeded)
        third = await world.service.outcome(f"{A}:2", 0.01)
        assert isinstance(third, Pending)
        assert "operation 1 of this model" in third.reason


async def test_an_early_arrival_is_acknowledged_and_waits() -> None:
    """Chunk 1 comes last: the others were accepted, acknowledged and journaled before it."""
    async with running(Disk()) as world:
        for operation in (optim(A, 4), fb(A, 3), fb(A, 2), create(A)):
            await world.service.accept(operation)
        assert isinstance(await world.service.outcome(f"{A}:0", 10), Succeeded)
        assert isinstance(await world.service.outcome(f"{A}:2", 0.01), Pending)
        await world.service.accept(fb(A, 1))
        assert isinstance(await world.service.outcome(f"{A}:4", 10), Succeeded)
        assert [seq for op, _, seq in world.engine.calls if op == "forward_backward"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("operation", "complaint"),
    [
        (create(A, rank=0), "lora_config.rank: must be positive"),
        (create(A, rank=65), "lora_config.rank: 65 is above this session's adapters.maxRank of 64"),
        (create(A, base="gpt-9"), "base_model: 'gpt-9' is not served here; this session serves 'smol'"),
        (Operation(A, 0, Refused("create_model", "optimizer_config: dimuon")), "optimizer_config: dimuon"),
    ],
)
async def test_a_model_that_cannot_be_ends_as_a_user_error(operation: Operation, complaint: str) -> None:
    """Bad content is accepted, and its outcome names the field; what follows on that stream fails too, not hangs."""
    async with running(Disk()) as world:
        await world.service.accept(operation)
        outcome = await world.service.outcome(f"{A}:0", 10)
        assert isinstance(outcome, Failed)
        assert outcome.error.startswith(complaint)
        assert outcome.category == "user"
        await world.service.accept(fb(A, 1))
        follower = await world.service.outcome(f"{A}:1", 10)
        assert isinstance(follower, Failed)
        assert complaint in follower.error
        assert world.service.model(A) is None
        assert isinstance((await Client().ask_after(world.service, create(B))), Succeeded)


async def test_the_number_of_models_is_limited() -> None:
    """The limit counts models that exist, not attempts that failed."""
    async with running(Disk(), max_models=1) as world:
        client = Client()
        await client.play(world.service, [[create(A, rank=0)], [create(B)], [create(f"{SESSION}:train:2")]])
        assert isinstance(client.told[f"{B}:0"], Succeeded)
        third = client.told[f"{SESSION}:train:2:0"]
        assert isinstance(third, Failed)
        assert "adapters.maxModels" in third.error


async def test_a_failed_forward_backward_costs_the_step_that_could_not_know() -> None:
    """The pipelined step fails and clears the accumulator; the loop goes on as if the window had not been."""
    async with running(Disk()) as world:
        client = Client()
        pipelined = [fb(A, 1, b"good"), fb(A, 2, b"bad"), optim(A, 3)]
        await client.play(world.service, [[create(A)], pipelined, [fb(A, 4), optim(A, 5)]])
        step = client.told[f"{A}:3"]
        assert isinstance(step, Failed)
        assert "operation 2 of this accumulation window" in step.error
        assert world.engine.models[A].applied == [5]


async def test_what_is_sent_after_a_failure_was_delivered_is_meant() -> None:
    """Who knows of the failure and goes on gets the step, with what it sent knowingly."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1, b"bad")], [fb(A, 2), optim(A, 3)]])
        assert isinstance(client.told[f"{A}:3"], Succeeded)
        assert world.engine.models[A].applied == [3]


async def test_the_good_half_of_a_failed_call_is_never_applied() -> None:
    """The SDK fails a call of several chunks as a whole: a call sent again must not count twice in its good chunks."""
    again = [fb(A, 3, b"good"), fb(A, 4, b"mended"), optim(A, 5)]
    once_more = [fb(A, 6, b"good"), fb(A, 7, b"mended"), optim(A, 8)]
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1, b"good"), fb(A, 2, b"bad")], again, once_more])
        step = client.told[f"{A}:5"]
        assert isinstance(step, Failed)
        assert "operation 2 of this accumulation window failed and operation 1 was sent before" in step.error
        assert world.engine.models[A].applied == [8]
        spoilt = world.engine.models[A].weights
    async with running(Disk()) as world:
        await Client().play(world.service, [[create(A)], [fb(A, 1, b"good"), fb(A, 2, b"mended"), optim(A, 3)]])
        assert world.engine.models[A].weights == spoilt


async def test_a_failure_is_delivered_only_after_its_delivery_is_durable() -> None:
    """The deliver record is flushed first: a replay must know what the client knew."""
    async with running(Disk()) as world:
        await world.service.accept(create(A))
        await world.service.accept(fb(A, 1, b"bad"))
        await until(lambda: any(model.seq == 1 for model in world.service.status().models))
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        world.files.on_flush = stall
        asking = [asyncio.create_task(world.service.outcome(f"{A}:1", 10)) for _ in range(2)]
        await asyncio.to_thread(started.wait, 10)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in asking)
        go.set()
        world.files.on_flush = None
        assert all(isinstance(outcome, Failed) for outcome in await asyncio.gather(*asking))
        await world.service.outcome(f"{A}:1", 10)
        journal = world.files.disk.files[layout.journal(1)].flushed
        assert journal.count(b'"t":"deliver"') == 1
    reopened = running(world.files.disk, attempt=2, pod="pod-2")
    async with reopened as world:
        assert [record for _, record in world.store.history if isinstance(record, Deliver)] == [Deliver(A, 1)]


async def test_a_failure_whose_delivery_took_too_long_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage hangs, and the poll is answered without the failure: what is sent meanwhile is sent in ignorance."""
    monkeypatch.setattr(service, "DELIVERY_SECONDS", 0.01)
    async with running(Disk()) as world:
        client = Client()
        for operation in (create(A), fb(A, 1, b"bad")):
            await client.send(world.service, operation)
        await until(lambda: any(model.seq == 1 for model in world.service.status().models))
        go = threading.Event()

        def hang() -> None:
            assert go.wait(10)

        world.files.on_flush = hang
        assert isinstance(await world.service.outcome(f"{A}:1", 10), Pending)
        sending = [asyncio.create_task(client.send(world.service, operation)) for operation in (fb(A, 2), optim(A, 3))]
        await asyncio.sleep(0)
        world.files.on_flush = None
        go.set()
        await asyncio.gather(*sending)
        step = await client.ask(world.service, f"{A}:3")
        assert isinstance(step, Failed)
        assert "this step was sent before its failure was delivered" in step.error
        assert isinstance(await client.ask(world.service, f"{A}:1"), Failed)
        await client.play(world.service, [[fb(A, 4), optim(A, 5)]])
        assert world.engine.models[A].applied == [5]


async def test_a_refused_step_leaves_the_gradients() -> None:
    """Bad parameters change nothing: the next good step, sent knowingly, applies what was accumulated."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1)], [optim(A, 2, -1.0)], [optim(A, 3)]])
        assert client.told[f"{A}:2"] == Failed("adam_params.learning_rate: must not be negative", "user")
        assert world.engine.models[A].applied == [3]
        assert world.service.status().models[0].step == 1


async def test_a_step_without_gradients_is_no_step() -> None:
    """It succeeds and says so, and the model's step count stays."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [optim(A, 1)]])
        told = client.told[f"{A}:1"]
        assert isinstance(told, Succeeded)
        assert json.loads(told.body)["metrics"] == {"skipped_no_gradients": 1.0}
        assert world.service.status().models[0].step == 0


async def test_streams_take_turns() -> None:
    """A long queue on one stream does not hold up the others: round robin, one operation at a time."""
    async with running(Disk(), available=False) as world:
        base = f"{SESSION}:sample:7"
        for operation in (create(A), create(B), *[fb(A, seq) for seq in range(1, 6)], *[fb(B, 1), fb(B, 2)]):
            await world.service.accept(operation)
        for seq in range(3):
            await world.service.accept(sample(base, seq, weights=None))
        world.source.available = True
        await world.service.outcome(f"{A}:5", 10)
        ran = ["sample" if op == "sample" else f"{'AB'[model == B]}{seq}" for op, model, seq in world.engine.calls]
        assert ran == ["A-1", "B-1", "sample", "A1", "B1", "sample", "A2", "B2", "sample", "A3", "A4", "A5"]


@pytest.mark.parametrize(
    "call",
    [
        lambda service: service.accept(fb(A, 3)),
        lambda service: service.accept(fb(A, 2)),
        lambda service: service.outcome(f"{A}:2", 0),
        lambda service: service.outcome(f"{A}:1", 0),
        lambda service: service.outcome(f"{A}:9", 0),
    ],
    ids=["submit", "repeat", "success", "failure", "unknown"],
)
async def test_every_effect_reads_the_fence_first(call: Callable[[SessionService], Awaitable[object]]) -> None:
    """A superseded server acknowledges and delivers nothing, not even what it had acknowledged and delivered before."""
    async with running(Disk(), fence_interval=1e6) as world:
        await Client().play(world.service, [[create(A)], [fb(A, 1, b"bad")], [fb(A, 2)]])
        claim(CrashFiles(world.files.disk), 9, "pod-9", TIME)
        with pytest.raises(Fenced):
            await call(world.service)


async def test_an_idle_server_notices_that_it_is_superseded() -> None:
    """run() ends with Fenced, and so does whoever waits for an outcome."""
    async with running(Disk()) as world:
        await world.service.accept(fb(A, 1))
        waiting = asyncio.create_task(world.service.outcome(f"{A}:1", 60))
        await asyncio.sleep(0)
        claim(CrashFiles(world.files.disk), 9, "pod-9", TIME)
        with pytest.raises(Fenced):
            await asyncio.wait_for(world.task, 10)
        with pytest.raises(Fenced):
            await asyncio.wait_for(waiting, 10)


async def test_a_failed_disk_ends_the_server() -> None:
    """run() ends with StorageFailed after the first failed flush, and nothing is told any more."""
    async with running(Disk()) as world:
        world.files.fail_flush = True
        with pytest.raises(StorageFailed):
            await world.service.accept(create(A))
        with pytest.raises(StorageFailed):
            await asyncio.wait_for(world.task, 10)
        with pytest.raises(StorageFailed):
            await world.service.accept(create(A))
        assert states(world.engine) == {}


DEEP: dict[str, object] = functools.reduce(lambda inner, _: {"a": inner}, range(230), {})
DEEPER: dict[str, object] = functools.reduce(lambda inner, _: {"a": inner}, range(300), {})


@pytest.mark.parametrize(
    "operation",
    [
        Operation(A, 0, CreateModel("smol", 4, 7, True, True, True, user_metadata=DEEP)),
        Operation(A, 0, CreateModel("smol", 4, 7, True, True, True, user_metadata=DEEPER)),
        Operation(A, 0, CreateModel("smol", 4, 7, True, True, True, user_metadata={"a": "\ud800"})),
        Operation(A, 0, CreateModel("\ud800", 4, 7, True, True, True)),
        Operation(A, 0, Refused("create_model", "\ud800: wrong")),
    ],
    ids=["deep", "deeper", "surrogate in metadata", "surrogate", "surrogate in a refusal"],
)
async def test_what_could_not_be_read_back_is_never_journaled(operation: Operation) -> None:
    """Such content ends as a user error, and the next incarnation reads the journal."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        outcome = await client.ask_after(world.service, operation)
        assert isinstance(outcome, Failed)
        assert outcome.category == "user"
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert await client.ask(world.service, operation.request_id) == outcome
        assert isinstance(await client.ask_after(world.service, create(B)), Succeeded)


async def test_an_engine_may_say_anything_of_a_failure() -> None:
    """A refusal whose words are not Unicode is journaled in words that can be read back."""
    disk, client = Disk(), Client()

    def refuse(_engine: FakeEngine, op: str) -> None:
        if op == "forward_backward":
            raise EngineRefused("data: \ud800", "user")

    async with running(disk, hook=refuse) as world:
        await client.ask_after(world.service, create(A))
        outcome = await client.ask_after(world.service, fb(A, 1))
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert await client.ask(world.service, f"{A}:1") == outcome == Failed("data: \\ud800", "user")
