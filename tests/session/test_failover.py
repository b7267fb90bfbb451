"""Engines die, servers restart, pods are replaced, zombies go on: the client sees one unbroken session."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from functools import partial

import pytest
import structlog

from everloop_trainer.session.errors import EngineRefused, Fenced, StorageFailed
from everloop_trainer.session.operations import CreateModel, Operation, SaveWeightsForSampler
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.records import Accept
from everloop_trainer.store import layout
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    LOOP,
    TIME,
    A,
    B,
    Client,
    Over,
    create,
    export,
    fb,
    freeze,
    load,
    optim,
    running,
    sample,
    save,
    states,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Died, Disk


async def count_calls() -> int:
    calls = itertools.count(1)
    made = 0

    def hook(_: FakeEngine, __: str) -> None:
        nonlocal made
        made = next(calls)

    async with running(Disk(), hook=hook) as world:
        await Client().play(world.service, LOOP)
        await world.settled()
    return made


async def test_the_engine_dies_in_each_call() -> None:
    """Whatever call it dies in, the next engine ends with the same adapters and the client was told the same."""
    adapters, told = await unbroken(LOOP)
    for die_at in range(1, await count_calls() + 1):
        for budget in (0.0, 1e9):
            calls = itertools.count(1)

            def hook(engine: FakeEngine, _: str, calls: itertools.count[int] = calls, die_at: int = die_at) -> None:
                if next(calls) == die_at:
                    engine.die()

            client = Client()
            async with running(Disk(), hook=hook, replay_budget=budget) as world:
                await client.play(world.service, LOOP)
                await world.settled()
                assert states(world.engine) == adapters
                assert client.told == told
                status = world.service.status()
                assert status.engine_restarts == (1 if len(world.source.engines) > 1 else 0)
                assert status.replay_mismatches == 0


async def test_the_engine_dies_idle() -> None:
    """A loss between two operations is noticed, repaired and reported without anybody asking."""
    async with running(Disk(), replay_budget=1e9) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
        before = states(world.engine)
        world.engine.die()
        await until(lambda: bool(world.service.status().recoveries))
        await world.settled()
        assert states(world.engine) == before
        (recovery,) = world.service.status().recoveries
        assert (recovery.id, recovery.reason) == ("a1-b1-e2", "EngineLost")
        assert recovery.resumed_from.endswith(":0")
        assert (recovery.replayed_operations, recovery.lost_operations) == (2, 0)
        assert recovery.seconds > 0


async def test_why_there_is_no_engine_is_said_once() -> None:
    """Who reads the log learns what a session waits for, and is not told the same twenty times."""
    with structlog.testing.capture_logs() as logs:
        async with running(Disk(), available=False) as world:
            await asyncio.sleep(0.2)  # several tries
            world.source.available = True
            await world.settled()
    said = [entry for entry in logs if entry["event"] == "no engine yet"]
    assert [(entry["error"], entry["log_level"]) for entry in said] == [("no engine", "warning")]


async def test_an_engine_that_dies_while_recovering_is_one_recovery() -> None:
    """The clock runs from the first loss; the report comes when every model is back."""
    deaths = iter([False, False, True, False])

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "init" and next(deaths, False):
            engine.die()

    async with running(Disk(), replay_budget=1e9, hook=hook) as world:
        await Client().play(world.service, [[create(A), create(B)]])
        world.engine.die()
        await until(lambda: bool(world.service.status().recoveries))
        assert [recovery.id for recovery in world.service.status().recoveries] == ["a1-b1-e3"]


def settled(files: CrashFiles, manifest: str, kept: list[str]) -> bool:
    """Whether a manifest is stored, and its directory holds only these snapshots."""
    return files.exists(manifest) and files.list(manifest.rsplit("/", 2)[0]) == kept


async def test_snapshots_bound_the_replay() -> None:
    """With a budget of nothing each step is snapshotted, two are kept, and only what came after is replayed."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)]])
        directory = layout.states(world.service.status().models[0].id, "snapshots")
        kept: list[str] = []
        for seq in range(2, 13, 2):
            await client.play(world.service, [[fb(A, seq - 1), optim(A, seq)]])
            kept = [*kept, f"1-{seq}"][-2:]
            manifest = f"{directory}/1-{seq}/{layout.MANIFEST}"
            await until(partial(settled, world.files, manifest, sorted(kept)))
        assert world.service.status().last_snapshot_time == TIME
        await client.play(world.service, [[fb(A, 13)]])
        world.engine.die()
        await until(lambda: bool(world.service.status().recoveries))
        (recovery,) = world.service.status().recoveries
        assert recovery.resumed_from.endswith(":12")
        assert recovery.replayed_operations == 1


async def test_snapshots_wait_for_their_budget() -> None:
    """Below the budget nothing is written; seconds are engine time, here two clock ticks an operation."""
    async with running(Disk(), replay_budget=1e9) as world:
        await Client().play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
        assert not any(op == "snapshot" for op, _, _ in world.engine.calls)


async def test_a_damaged_snapshot_costs_replay_only() -> None:
    """The older snapshot serves; and with none left, the beginning."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)], [fb(A, 3), optim(A, 4)]])
        await world.service.drain(10)
        adapters = {A: world.engine.models[A].dump()}
    directory = layout.states(world.service.status().models[0].id, "snapshots")
    for attempt, (damaged, resumed) in enumerate([("1-4", 2), ("1-2", 0)], start=2):
        disk.files[f"{directory}/{damaged}/{layout.STATE}"].written += b"x"
        async with running(disk, attempt=attempt, pod=f"pod-{attempt}", replay_budget=1e9) as world:
            await world.settled()
            assert states(world.engine) == adapters
            assert world.service.status().recoveries[0].resumed_from.endswith(f":{resumed}")


async def test_a_snapshot_of_an_operation_without_a_result_is_not_used() -> None:
    """Drained in the middle: results come first, so a snapshot never holds what would be run again."""
    for die_at in range(1, 60):
        files = CrashFiles(disk := Disk(), die_at=die_at)
        try:
            async with running(disk, files=files) as world:
                await Client().play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
                await world.service.drain(10)
        except (*Over, Died):
            assert files.dead
        disk.lose_power()
        async with running(disk, attempt=2, pod="pod-2") as world:
            await Client().play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
            assert world.engine.models[A].applied == [2]


async def test_restart_in_place() -> None:
    """The same pod comes back as the next boot and says ServerRestarted; another pod says PodReplaced."""
    disk = Disk()
    async with running(disk) as world:
        await Client().play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
        before = states(world.engine)
    async with running(disk) as world:
        await world.settled()
        assert world.service.status().incarnation.boot == 2
        assert world.service.status().recoveries[0].reason == "ServerRestarted"
        assert world.service.status().recoveries[0].id == "a1-b2-e1"
        assert states(world.engine) == before
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        assert world.service.status().recoveries[0].reason == "PodReplaced"
        assert states(world.engine) == before
    with pytest.raises(Fenced):
        async with running(disk, attempt=1):
            raise AssertionError("an older attempt served")


async def test_a_new_session_recovers_nothing() -> None:
    """The first start of all is no recovery."""
    async with running(Disk()) as world:
        await world.settled()
        assert world.service.status().recoveries == ()
        assert world.service.status().to_json()["state"] == "Serving"


async def test_three_incarnations_serve_at_once() -> None:
    """Two zombies keep taking and running operations: none is acknowledged, told or counted."""
    disk, client = Disk(), Client()
    adapters, told = await unbroken(LOOP)
    async with running(disk, fence_interval=1e6) as first:
        await client.play(first.service, LOOP[:2])
        async with running(disk, attempt=2, pod="pod-2", fence_interval=1e6) as second:
            await client.play(second.service, LOOP[:3])
            with pytest.raises(Fenced):
                await first.service.accept(fb(A, 5, b"zombie"))
            async with running(disk, attempt=3, pod="pod-3") as third:
                with pytest.raises(Fenced):
                    await second.service.accept(fb(A, 5, b"zombie"))
                with pytest.raises(Fenced):
                    await second.service.outcome(f"{A}:1", 0)
                await client.play(third.service, LOOP)
                await third.settled()
                assert states(third.engine) == adapters
                assert client.told == told


async def test_a_zombie_in_mid_operation_adds_nothing() -> None:
    """It finishes its step after the newcomer claimed: no result, no snapshot, no checkpoint of it counts."""
    disk, client = Disk(), Client()
    adapters, told = await unbroken(LOOP)
    async with running(disk, fence_interval=1e6) as old:
        await client.play(old.service, LOOP[:3])
        await old.settled()
        gate = old.engine.gate = asyncio.Event()
        for operation in LOOP[3]:
            await old.service.accept(operation)
            client.acknowledged.add(operation.request_id)
        await asyncio.sleep(0)
        async with running(disk, attempt=2, pod="pod-2") as new:
            gate.set()
            with pytest.raises(Fenced):
                await asyncio.wait_for(old.task, 10)
            await client.play(new.service, LOOP)
            await new.settled()
            assert states(new.engine) == adapters
            assert client.told == told
        async with running(disk, attempt=3, pod="pod-3") as next_one:
            await next_one.settled()
            assert states(next_one.engine) == adapters


async def test_drain_finishes_and_snapshots() -> None:
    """After an orderly shutdown nothing has to be replayed, and what had not started waits for the next one."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(A, 1), optim(A, 2), fb(B, 1)]])
        gate = world.engine.gate = asyncio.Event()
        await world.service.accept(fb(A, 3))
        await until(lambda: ("forward_backward", A, 3) in world.engine.calls)
        await world.service.accept(optim(A, 4))
        draining = asyncio.create_task(world.service.drain(10))
        await asyncio.sleep(0)
        gate.set()
        await draining
        await asyncio.wait_for(world.task, 10)
        assert isinstance(await world.service.outcome(f"{A}:3", 0), Succeeded)
        assert isinstance(await world.service.outcome(f"{A}:4", 0), Pending)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert isinstance(await world.service.outcome(f"{A}:4", 10), Succeeded)
        assert world.service.status().recoveries[0].replayed_operations == 0
        assert world.engine.models[A].applied == [2, 4]
        assert len(world.engine.models[B].gradients) == 1


async def test_drain_after_a_load() -> None:
    """A load has stored its model already; the others are stored, and nothing goes wrong that would be reported."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(A, 1), optim(A, 2), fb(B, 1)], [save(A, 3, "s")]])
        await client.play(world.service, [[load(A, 4, f"tinker://{A}/weights/s")]])
        await world.service.drain(10)
        await asyncio.wait_for(world.task, 10)
        assert world.service.status().storage_error == ""
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, [[fb(A, 5), optim(A, 6)], [optim(B, 2)]])
        assert world.service.status().recoveries[0].replayed_operations == 0


async def test_drain_abandons_what_does_not_end() -> None:
    """An operation that outlasts the deadline is left to the next incarnation, which runs it once."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)]])
        world.engine.gate = asyncio.Event()
        await world.service.accept(fb(A, 1))
        await world.service.accept(optim(A, 2))
        await world.service.drain(0.05)
        await asyncio.wait_for(world.task, 10)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert isinstance(await world.service.outcome(f"{A}:2", 10), Succeeded)
        assert world.engine.models[A].applied == [2]


async def test_seeds_are_drawn_once() -> None:
    """A model and a sample without a seed get one at acceptance, and keep it through every replay."""
    disk = Disk()
    async with running(disk) as world:
        client = Client()
        await client.play(world.service, [[create(A, seed=None)]])
        before = states(world.engine)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        assert states(world.engine) == before
        accepted = [record for _, record in world.store.history if isinstance(record, Accept)]
        assert isinstance(accepted[0].args, CreateModel)
        assert accepted[0].args.seed == json.loads(before[A])["lora"]["seed"]


async def test_a_model_that_cannot_be_restored_stops_alone_and_loudly() -> None:
    """Its operations are counted as lost and wait; the other model goes on."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(A, 1, b"unlucky"), fb(B, 1), optim(B, 2)]])

    def hook(engine: FakeEngine, op: str) -> None:
        model = engine.calls[-1][1]
        if op == "forward_backward" and model == A:
            raise EngineRefused("no memory for it", "server")

    async with running(disk, attempt=2, pod="pod-2", hook=hook) as world:
        await world.service.accept(optim(A, 2))
        await world.service.accept(fb(B, 3))
        assert isinstance(await world.service.outcome(f"{B}:3", 10), Succeeded)
        waiting = await world.service.outcome(f"{A}:2", 0.01)
        assert isinstance(waiting, Pending)
        assert "could not be restored: no memory for it" in waiting.reason
        status = world.service.status()
        assert "no memory for it" in status.storage_error
        world.engine.die()
        await until(lambda: len(world.service.status().recoveries) == 2)
        assert world.service.status().recoveries[1].lost_operations == 1
    async with running(disk, attempt=3, pod="pod-3") as world:  # mended
        assert isinstance(await world.service.outcome(f"{A}:2", 10), Succeeded)


async def test_a_replay_that_differs_is_counted() -> None:
    """An engine that answers something else than before is reported, loudly."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1)]])

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "forward_backward":
            engine.models[A].weights += 1

    async with running(disk, attempt=2, pod="pod-2", hook=hook) as world:
        await world.settled()
        assert world.service.status().replay_mismatches == 1
        told = await client.ask(world.service, f"{A}:1")  # the delivered result is served again as it was
        assert isinstance(told, Succeeded)


async def test_saving_and_sampling() -> None:
    """Names are taken once unless overwritten; a sampler stays on its weights, by path or by session."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        service = world.service
        await client.play(service, [[create(A)], [fb(A, 1), optim(A, 2)], [save(A, 3, "n")], [save(A, 4, "n")]])
        again = client.told[f"{A}:4"]
        assert again == Failed("path: a checkpoint named 'n' already exists", "user")
        path = f"tinker://{A}/weights/n"
        stream = f"{A.partition(':')[0]}:sample:9"
        first = await client.ask_after(service, sample(stream, 0, path))
        await client.play(service, [[fb(A, 5), optim(A, 6)], [save(A, 7, "n", overwrite=True)], [save(A, 8, "a/b")]])
        assert isinstance(client.told[f"{A}:8"], Failed)
        second = await client.ask_after(service, sample(stream, 1, path))
        assert second != first
        base = await client.ask_after(service, sample(stream, 2, None))
        assert base not in (first, second)
        nowhere = await client.ask_after(service, sample(stream, 3, f"tinker://{A}/weights/x"))
        assert isinstance(nowhere, Failed)
        assert nowhere.category == "user"
        unknown = await client.ask_after(service, sample(stream, 4))
        assert isinstance(unknown, Failed)
        latest = service.status().models[0].latest_checkpoint
        assert latest is not None
        assert (latest.name, latest.step, latest.path) == ("n", 2, path)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert await client.ask(world.service, f"{stream}:0") == first
        assert await client.ask_after(world.service, sample(stream, 5, path)) == second


class DiesAfterManifest(CrashFiles):
    """The process dies when a checkpoint's manifest is on disk and its operation has no result yet."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        if "checkpoints" in path and path.endswith(layout.MANIFEST):
            self.kill()


@pytest.mark.parametrize(
    "operation", [save(A, 3, "n"), freeze(A, 3, 0), export(A, 3, "n")], ids=["named", "frozen", "external"]
)
async def test_a_save_recognises_its_own_work(operation: Operation) -> None:
    """A checkpoint that was stored before its result could be journaled is taken as it is, not stored again."""
    disk, client = Disk(), Client()
    files = DiesAfterManifest(disk)
    with pytest.raises(StorageFailed):
        async with running(disk, files=files) as world:
            await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)], [operation]])
    disk.lose_power()
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert isinstance(await world.service.outcome(f"{A}:3", 10), Succeeded)
        assert not any(op == "write" for op, _, _ in world.engine.calls)
        (checkpoint,) = [path for path in disk.files if "checkpoints" in path and path.endswith(layout.STATE)]
        assert "/1-3/" in checkpoint


async def test_a_damaged_half_saved_checkpoint_is_stored_again() -> None:
    """What does not have the hash that its manifest names is not recognised."""
    disk, client = Disk(), Client()
    with pytest.raises(StorageFailed):
        async with running(disk, files=DiesAfterManifest(disk)) as world:
            await client.play(world.service, [[create(A)], [save(A, 1, "n")]])
    (path,) = [path for path in disk.files if "checkpoints" in path and path.endswith(layout.STATE)]
    disk.files[path].written += b"x"
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert isinstance(await world.service.outcome(f"{A}:1", 10), Succeeded)
        assert ("write", A, 1) in world.engine.calls


async def test_snapshot_samplers_stay_and_inflight_samplers_follow() -> None:
    """Of two samplers of one model, only the inflight one draws from weights that were saved later."""
    still, moving = (f"{A.partition(':')[0]}:sample:{number}" for number in (0, 1))
    inflight = [Operation(A, seq, SaveWeightsForSampler(None, number, "inflight")) for seq, number in ((4, 1), (7, 2))]
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)], [freeze(A, 3, 0)], [inflight[0]]])
        before = [await client.ask_after(world.service, sample(stream, 0)) for stream in (still, moving)]
        assert before[0] == before[1]
        await client.play(world.service, [[fb(A, 5), optim(A, 6)], [inflight[1]]])
    async with running(disk, attempt=2, pod="pod-2") as world:
        after = [await client.ask_after(world.service, sample(stream, 1)) for stream in (still, moving)]
        assert after[0] == before[0]
        assert after[1] != before[1]
        sampler = world.service.sampler(moving)
        assert sampler is not None
        assert (sampler.model_id, sampler.kind) == (A, "inflight")
        model = world.service.model(A)
        assert model is not None
        assert model.lora.rank == 4


async def test_nothing_runs_while_its_acceptance_is_not_durable() -> None:
    """A stream that waits for a number does not start when the number is appended, but when it is flushed."""
    async with running(Disk()) as world:
        await world.service.accept(fb(A, 1))
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        world.files.on_flush = stall
        creating = asyncio.create_task(world.service.accept(create(A)))
        await asyncio.to_thread(started.wait, 10)
        world.engine.die()  # the runner looks for work anew
        await until(lambda: len(world.source.engines) == 2 and world.service.status().state == "Serving")
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.engine.calls == []
        world.files.on_flush = None
        go.set()
        await creating
        assert isinstance(await world.service.outcome(f"{A}:1", 10), Succeeded)
