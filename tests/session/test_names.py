"""Names of checkpoints: two kinds do not meet, and none leads out of the store."""

from __future__ import annotations

import json

import pytest

from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.store import layout
from tests.session.world import A, Client, create, fb, freeze, load, optim, running, save
from tests.store.crash_files import Disk

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "/x",
    "a/b",
    "a\\b",
    "a\0",
    "a\n",
    "n" * 201,
    " a",
    "-a",
    "\u00e4",
    "a%2fb",
    "\u2024\u2024",
]


@pytest.mark.parametrize("name", HOSTILE, ids=[repr(name[:8]) for name in HOSTILE])
async def test_a_name_leads_nowhere_else(name: str) -> None:
    """Refused by its field for either kind, and nothing is stored; the next save is as if it had not been."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)]])
        before = set(disk.files)
        await client.play(world.service, [[save(A, 3, name)], [freeze(A, 4, None, name)], [save(A, 5, "good")]])
    for seq in (3, 4):
        told = client.told[f"{A}:{seq}"]
        assert isinstance(told, Failed)
        assert (told.category, told.error.partition(":")[0]) == ("user", "path")
    assert isinstance(client.told[f"{A}:5"], Succeeded)
    manifests = [path for path in set(disk.files) - before if path.endswith(layout.MANIFEST) and "checkpoints" in path]
    assert len(manifests) == 1


def path_of(outcome: Succeeded | Failed) -> str:
    assert isinstance(outcome, Succeeded)
    return str(json.loads(outcome.body)["path"])


async def test_one_name_is_two_checkpoints_of_two_kinds() -> None:
    """Both are there, each of its own moment; that of a sampler can't be gone on from with an optimizer."""
    disk, client = Disk(), Client()
    other = A.rpartition(":")[0] + ":7"
    third = A.rpartition(":")[0] + ":8"
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1), optim(A, 2)], [save(A, 3, "x")]])
        await client.play(world.service, [[fb(A, 4), optim(A, 5)], [freeze(A, 6, None, "x")]])
        saved, frozen = (path_of(client.told[f"{A}:{seq}"]) for seq in (3, 6))
        assert (saved, frozen) == (f"tinker://{A}/weights/x", f"tinker://{A}/sampler_weights/x")
        await client.play(world.service, [[load(other, 0, saved)], [load(third, 0, frozen)]])
    assert isinstance(client.told[f"{other}:0"], Succeeded)
    refused = client.told[f"{third}:0"]
    assert isinstance(refused, Failed)
    assert refused.category == "user"
    assert frozen in refused.error
