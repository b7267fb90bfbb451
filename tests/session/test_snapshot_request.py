"""Snapshots that the operator asks for, ahead of a move of the pod."""

from __future__ import annotations

from tests.session.world import A, B, Client, create, fb, optim, running, states, until
from tests.store.crash_files import Disk

BATCH = [[create(A)], [create(B)], [fb(A, 1), optim(A, 2)], [fb(B, 1), optim(B, 2)], [fb(A, 3)]]


async def test_every_model_is_snapshotted_once_for_a_request() -> None:
    """Gradients that wait for their step are in it too; a repeated request writes nothing more, another one may."""
    disk = Disk()
    async with running(disk, replay_budget=1e9) as world:
        await Client().play(world.service, BATCH)
        assert world.service.status().snapshot_request is None
        world.service.request_snapshots("first")
        assert world.service.status().snapshot_request == ("first", 2)
        await until(lambda: world.service.status().snapshot_request == ("first", 0))
        adapters = states(world.engine)
        written = [model for operation, model, _ in world.engine.calls if operation == "snapshot"]
        assert sorted(written) == [A, B]
        world.service.request_snapshots("first")
        assert world.service.status().snapshot_request == ("first", 0)
        world.service.request_snapshots("second")
        await until(lambda: world.service.status().snapshot_request == ("second", 0))
        assert len([operation for operation, _, _ in world.engine.calls if operation == "snapshot"]) == 2
    async with running(disk, attempt=2, pod="pod-2", replay_budget=1e9) as world:
        await world.settled()
        assert states(world.engine) == adapters
        assert [recovery.replayed_operations for recovery in world.service.status().recoveries] == [0]


async def test_a_request_without_models_is_fulfilled_at_once() -> None:
    """An empty session may move."""
    async with running(Disk()) as world:
        await world.settled()
        world.service.request_snapshots("only")
        await until(lambda: world.service.status().snapshot_request == ("only", 0))
