"""The sessions of clients, by what they have made."""

from __future__ import annotations

from everloop_trainer.session.clients import ClientSession, client_sessions
from tests.session.compacted import compact, history_of, opened_copy
from tests.session.world import SAMPLER, SESSION, A, B, Client, create, fb, freeze, optim, running, sample, save
from tests.store.crash_files import Disk

OTHER = "s-aaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb"


async def test_what_belongs_to_a_session_is_told() -> None:
    """Models that exist, samplers that were made or used, checkpoints that are listed; also after a compaction."""
    times = (f"2030-01-01T00:00:{second:02d}.000Z" for second in range(60))
    disk, client = Disk(), Client()
    async with running(disk, now=lambda: next(times)) as world:
        await client.play(
            world.service,
            [
                [create(A)],
                [create(B, rank=1000)],
                [fb(A, 1), optim(A, 2)],
                [save(A, 3, "half"), freeze(A, 4, 0), save(A, 5, "gone")],
                [sample(f"{OTHER}:sample:3", 0, None)],
            ],
        )
        await world.service.keeping.remove(f"tinker://{A}/weights/gone", "r1")
        told = world.service.client_sessions()
        size = world.service.runs()[0].checkpoints[0].stored.size
        assert told == [
            ClientSession(SESSION, "2030-01-01T00:00:00.000Z", (A,), (SAMPLER,), 1, size),
            ClientSession(OTHER, told[1].created, (), (f"{OTHER}:sample:3",), 0, 0),
        ]
        assert told[1].created > told[0].created
        await compact(world)
        assert client_sessions(history_of(await opened_copy(disk))) == told
