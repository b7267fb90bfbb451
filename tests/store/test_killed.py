"""A real process on a real file system, killed while it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from everloop_trainer.session.records import Accept
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.opening import open_store
from tests.session.world import TIME, claimant

WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.opening import open_store
from tests.session.world import TIME, claimant
from tests.store.records import accept

async def write(first: int) -> None:
    store = await open_store(PosixFiles(Path(sys.argv[1])), claimant(), TIME)
    for seq in itertools.count(first, 3):
        await asyncio.gather(*(store.journal.append(accept(seq + i), bytes(1000))[1] for i in range(3)))
        print(seq + 2, flush=True)

asyncio.run(write(int(sys.argv[2])))
"""


async def test_what_a_killed_process_had_acknowledged_is_there(tmp_path: Path) -> None:
    """Three boots of one pod, each ended by SIGKILL in the middle: every acknowledged record is in the history."""
    for boot in range(3):
        acknowledged: set[int] = set()
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * boot)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                if line.strip().isdecimal():  # the rest is its log
                    last = int(line)
                    acknowledged |= {last - 2, last - 1, last}
                if len(acknowledged) >= 60:
                    break
            writer.kill()
        store = await open_store(PosixFiles(tmp_path), claimant(), TIME)
        await store.journal.close()
        known = {record.seq for _, record in store.history if isinstance(record, Accept)}
        assert len(acknowledged) == 60
        assert acknowledged <= known
    assert store.incarnation.boot == 6
