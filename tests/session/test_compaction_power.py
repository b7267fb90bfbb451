"""Power is lost at every write of a loop on a real file system that compacts its journal all the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.store import layout
from everloop_trainer.store.compacting import Limits
from tests.session import test_power_loss as loss
from tests.session.test_power_loss import Told, VolumeFiles
from tests.session.test_power_loss import quick_flushes as quick_flushes
from tests.session.world import LOADS, LOOP, Serving, running_on
from tests.store.power import Name

ALWAYS = Limits(1, 1)


def assert_stored(world: Serving[VolumeFiles], told: Told) -> None:
    """Every listed checkpoint is there, and every told result is known."""
    history = world.service._context.history
    assert all(history.find(request) is not None for request in told.outcomes)
    for run in world.service.runs():
        for each in run.checkpoints:
            where = layout.state(storage_id(each.model_id), each.stored.kind, each.stored.key)
            assert world.files.sha256(f"{where}/{layout.STATE}") == (each.stored.sha256, each.stored.size)


def often(files: VolumeFiles, **given: Any) -> AbstractAsyncContextManager[Serving[VolumeFiles]]:
    """As `running_on`, but for when there is something to compact and how often somebody looks."""
    return running_on(files, **given | {"limits": ALWAYS, "fence_interval": 0.003})


@pytest.fixture(autouse=True)
def always_compacting() -> Iterator[None]:
    """Whenever anything was journaled."""
    with (
        mock.patch.object(loss, "running_on", often),
        mock.patch.object(loss, "assert_stored", assert_stored),
    ):
        yield


LOOPS = pytest.mark.parametrize("loop", [LOOP, LOADS], ids=["loop", "loads"])


@LOOPS
def test_the_loop_is_compacted_on_its_way(loop: loss.Loop, tmp_path: Path) -> None:
    """Or the tests below would show nothing: bases are written, and files before them removed, again and again."""
    recorder = loss.record(loop, tmp_path / "volume")
    names = [event for event in recorder.events if isinstance(event, Name)]
    made = [event.name for event in names if event.child is not None and event.name.endswith(".base")]
    gone = [event.name for event in names if event.child is None and event.name.endswith((".base", ".log"))]
    assert (len(made) > 1, len(gone) > 2) == (True, True), (made, gone)


@LOOPS
@pytest.mark.usefixtures("quick_flushes")
def test_nothing_is_needed_that_was_not_flushed(loop: loss.Loop, tmp_path: Path) -> None:
    """All that was not flushed is gone, of bases too."""
    loss.test_nothing_is_needed_that_was_not_flushed(loop, tmp_path)


@LOOPS
@pytest.mark.usefixtures("quick_flushes")
def test_anything_may_be_left_of_what_was_not_flushed(loop: loss.Loop, tmp_path: Path) -> None:
    """Parts of bases, and files that were to be removed, are there or not."""
    loss.test_anything_may_be_left_of_what_was_not_flushed(loop, tmp_path)


@LOOPS
@pytest.mark.usefixtures("quick_flushes")
def test_what_a_killed_process_left_is_not_taken_for_flushed(loop: loss.Loop, tmp_path: Path) -> None:
    """Killed before a flush, and started again on what the next one makes durable."""
    loss.test_what_a_killed_process_left_is_not_taken_for_flushed(loop, tmp_path)
