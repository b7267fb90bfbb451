"""What the version before this one wrote is read, continued and compacted; what a newer one wrote is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.store import layout
from everloop_trainer.store.segments import MAGIC, OLDER
from tests.session.compacted import compact, opened_copy
from tests.session.world import LOOP, Client, running, states, unbroken
from tests.store.crash_files import CrashFiles, Disk

STORED = Path(__file__).with_name("format1.json")
"""Two incarnations of that version, the second killed before the last part of LOOP; files in base64."""


def older_disk() -> Disk:
    disk = Disk()
    for path, content in json.loads(STORED.read_text()).items():
        CrashFiles(disk).create(path, base64.b64decode(content))
    return disk


async def test_a_journal_of_the_format_before_is_gone_on_with() -> None:
    """And after a compaction nothing of the older format is left."""
    disk, client = older_disk(), Client()
    assert disk.files[layout.journal(2)].written.startswith(OLDER)
    for attempt in (3, 4):
        async with running(disk, attempt=attempt, pod=f"pod-{attempt}", checkpoint_every=0.01) as world:
            await client.play(world.service, LOOP)
            await compact(world)
            assert (states(world.engine), client.told) == await unbroken(LOOP)
            assert world.service.status().replay_mismatches == 0
    assert not any(content.written.startswith(OLDER) for content in disk.files.values())


async def test_a_journal_of_a_newer_format_is_refused() -> None:
    """It may mean what this version does not know: it is no torn file either."""
    disk = older_disk()
    content = disk.files[layout.journal(2)]
    content.written = content.flushed = MAGIC[:-1] + bytes([MAGIC[-1] + 1]) + content.written[len(MAGIC) :]
    with pytest.raises(JournalDamaged, match=r"journal/00000002.log: format 4 is newer than 3"):
        await opened_copy(disk)
