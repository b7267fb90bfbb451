"""Compacting on demand, and looking at what a history says."""

from __future__ import annotations

import copy
from typing import Any

from everloop_trainer.session.base import restore
from everloop_trainer.session.history import History
from everloop_trainer.session.streams import Stream
from everloop_trainer.store.opening import OpenedStore, open_store
from tests.session.world import TIME, Running, claimant
from tests.store.crash_files import CrashFiles, Disk


async def quiet(world: Running) -> None:
    """Return when nothing is pending and no snapshot is under way."""
    await world.settled()
    await world.service._runner.snapshots._settle()


async def compact(world: Running) -> None:
    """Compact now, as the session does by itself when it is due."""
    await quiet(world)
    await world.service._compacting._note_fetched()
    await world.service._compacting._compact()


async def opened_copy(disk: Disk) -> OpenedStore:
    """What an incarnation that came now would find; the disk stays as it is."""
    store = await open_store(CrashFiles(copy.deepcopy(disk)), claimant(9, "pod-9"), TIME)
    await store.journal.close()
    return store


def history_of(store: OpenedStore) -> History:
    """The facts that a store holds."""
    history = History() if store.base is None else restore(store.base)
    for position, record in store.history:
        history.apply(record, position)
    return history


def facts(history: History) -> dict[str, Any]:
    """All that a history says, but for the keys of pruned checkpoints, which no later incarnation needs."""
    known = copy.deepcopy(vars(history))
    for model in known["models"].values():
        model.pruned.clear()
    return known


def known_numbers(stream: Stream) -> list[int]:
    """Every number that the stream knows, each once."""
    numbers = [*stream.entries, *stream.owed.numbers]
    numbers += [number for start, end in stream.gone.ranges() for number in range(start, end)]
    return sorted(numbers)


def journal_files(disk: Disk) -> list[str]:
    """The files of the journal, bases among them."""
    return sorted(name for name in disk.files if name.startswith("journal/"))
