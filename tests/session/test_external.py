"""Weights that are saved to be downloaded: kept like other checkpoints, and read by nobody here."""

from __future__ import annotations

from pathlib import Path

import pytest

from everloop_trainer.session.copying import wanted
from everloop_trainer.session.errors import StorageFailed
from everloop_trainer.session.keeping import NoCheckpoint
from everloop_trainer.session.operations import Operation, SaveWeightsExternal
from everloop_trainer.session.outcomes import Failed, Succeeded
from tests.session.compacted import compact
from tests.session.kept import Calendar, keys, listed, stored
from tests.session.world import A, C, Client, create, export, fb, load, optim, running, sample, save, until
from tests.store.crash_files import CrashFiles, Disk

OUT, PLAIN = f"tinker://{A}/external_weights/out", f"tinker://{A}/external_weights/plain"
SAMPLER = f"{A.partition(':')[0]}:sample:9"
SAVED = [[create(A)], [fb(A, 1), optim(A, 2)], [export(A, 3, "plain"), export(A, 4, "out", "age1one", "age1two")]]


async def test_its_files_are_found_until_it_expires() -> None:
    """By the key of what was saved, encrypted for those who were named, after a compaction and a restart too."""
    clock, disk, client = Calendar(), Disk(), Client()
    async with running(disk, now=clock) as world:
        await client.play(world.service, SAVED)
        expected = {PLAIN: "2030-01-01T01:00:00.000Z", OUT: "2030-01-01T01:00:00.000Z"}
        assert listed(world.service) == expected
        content = {Path(path).parent.name: file.written for path, file in disk.files.items() if "external" in path}
        assert content["1-4"] != content["1-3"]
        await compact(world)
    async with running(disk, attempt=2, pod="pod-2", now=clock) as world:
        assert listed(world.service) == expected
        assert [world.service.keeping.state(path)[0].parent.name for path in (PLAIN, OUT)] == ["1-3", "1-4"]
        clock.hour = 1
        await until(lambda: listed(world.service) == {})
        with pytest.raises(NoCheckpoint):
            world.service.keeping.state(OUT)
        await until(lambda: stored(world) == keys(world) == set())


async def test_a_repeat_is_the_same_and_a_name_is_taken_once() -> None:
    """The answer has path and size; a name that is taken or leads elsewhere, or a short life, is refused."""
    client = Client()
    async with running(Disk()) as world:
        late = Operation(A, 7, SaveWeightsExternal("late", 3599))
        await client.play(world.service, [*SAVED, [export(A, 5, "out")], [export(A, 6, "../x")], [late]])
        first = client.told[f"{A}:4"]
        assert isinstance(first, Succeeded)
        size = b"for age1one age1two"
        assert first.body == f'{{"path":"{OUT}","type":"save_weights_external","size_bytes":{len(size)}}}'.encode()
        assert await client.ask_after(world.service, export(A, 4, "another")) == first
        for seq, field in ((5, "path"), (6, "path"), (7, "ttl_seconds")):
            told = client.told[f"{A}:{seq}"]
            assert isinstance(told, Failed)
            assert (told.category, told.error.partition(":")[0]) == ("user", field)


@pytest.mark.parametrize("path", [PLAIN, OUT])
async def test_it_is_read_by_nobody_here(path: str) -> None:
    """Neither loaded, into a new model or its own, nor sampled from, nor copied; each refusal names the path."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, [*SAVED, [save(A, 5, "half")]])
        reading = [load(C, 0, path, optimizer=False), load(A, 6, path, optimizer=False), sample(SAMPLER, 0, path)]
        for operation in reading:
            told = await client.ask_after(world.service, operation)
            assert isinstance(told, Failed)
            assert told.category == "user"
            assert path in told.error
            assert "to be downloaded" in told.error
        assert [each.kind for each in wanted(world.service._context.history, {})] == ["weights"]


class DiesWriting(CrashFiles):
    """The process dies when external weights are on disk, and nothing says yet that they count."""

    def write_state(self, path: str, data: bytes) -> None:
        super().write_state(path, data)
        if "external_weights" in path:
            self.kill()


async def test_what_a_killed_save_left_goes() -> None:
    """It is saved again, once, and of the first try there is no file any more."""
    disk, client = Disk(), Client()
    with pytest.raises(StorageFailed):
        async with running(disk, files=DiesWriting(disk)) as world:
            await client.play(world.service, [[create(A)], [export(A, 1, "out")]])
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert stored(world) == {"1-1"}
        assert isinstance(await world.service.outcome(f"{A}:1", 10), Succeeded)
        assert keys(world) == {"2-1"}
        await until(lambda: stored(world) == keys(world))
