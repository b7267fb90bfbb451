"""What memory there is: the tightest of the limits, and what models will still take of it."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from everloop_trainer.engine import memory
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.worker import Worker
from tests.engine.client import LORA, Engine, datum, request

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def kernel(root: Path, cgroup: str, groups: dict[str, str], meminfo: str = MEMINFO) -> memory.Available:
    """What is found where the kernel shows these files."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(meminfo)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in groups.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory.available(root / "proc", root / "groups")


def v1(path: str, limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    """A group of version 1."""
    return {
        f"memory{path}/memory.limit_in_bytes": f"{limit}\n",
        f"memory{path}/memory.usage_in_bytes": f"{usage}\n",
        f"memory{path}/memory.stat": f"inactive_file 7\ntotal_inactive_file {inactive}\n",
    }


def v2(path: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    """A group of version 2."""
    return {
        f".{path}/memory.max": f"{limit}\n",
        f".{path}/memory.current": f"{usage}\n",
        f".{path}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


NODE = memory.Available(800 * 1024, 1000 * 1024, "the node's memory")
POD = "the memory limit of the pod"


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("0::/\n", {}, NODE),
        ("0::/\n", v2("", "max", 5), NODE),
        ("0::/\n", v2("", "9000", 4000), memory.Available(5000, 9000, POD)),
        ("0::/\n", v2("", "9000", 4000, 1000), memory.Available(6000, 9000, POD)),
        ("0::/\n", v2("", "9000000", 0), NODE),
        ("0::/\n", v2("", "9000", 10_000), memory.Available(-1000, 9000, POD)),
        ("0::/a/b\n", v2("/a", "9000", 8000) | v2("/a/b", "max", 10), memory.Available(1000, 9000, POD)),
        ("0::/a\n", v2("", "9000", 8000), memory.Available(1000, 9000, POD)),  # the container's own view of a path
        ("5:cpu:/x\n4:memory:/x\n0::/\n", v1("/x", 9000, 4000, 500), memory.Available(5500, 9000, POD)),
        ("4:memory:/x\n", v1("", 9000, 4000), memory.Available(5000, 9000, POD)),
        ("4:memory:/x\n", v1("/x", 2**63 - 4096, 4000), NODE),
        ("9:name=systemd:/\n3:cpu:/x\n", v1("/x", 9000, 4000), NODE),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, cgroup: str, groups: dict[str, str], expected: memory.Available
) -> None:
    """Of the node, of a group of either version, or of one above it; files that nobody uses give way."""
    assert kernel(tmp_path, cgroup, groups) == expected


def test_a_kernel_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    """Nothing is assumed in its place."""
    with pytest.raises(ValueError, match="MemAvailable"):
        kernel(tmp_path, "0::/\n", {}, meminfo="MemTotal: 5 kB\n")


def test_this_machine_has_some() -> None:
    """The real files are read."""
    found = memory.available()
    assert 0 < found.free <= found.total


def test_room_counts_what_models_will_take(tiny_spare: Path) -> None:
    """An adapter needs four float32 vectors, one of which a model without gradients has not taken yet."""
    lora = {**LORA, "rank": 16}
    with Engine(tiny_spare) as engine:
        asked, _ = engine.call("room", **lora)
        made, _ = engine.call("init", model="m", **lora)
        assert asked["parameters"] == made["parameters"]
        assert asked["needed"] == 16 * made["parameters"]
        assert asked["of"] in ("the node's memory", POD)
        before = _anonymous(engine.pid)
        for index in range(60):
            engine.call("init", model=f"m{index}", **lora)
        grown = _anonymous(engine.pid) - before
        assert grown > 0.9 * 60 * 12 * made["parameters"], "weights and moments were not taken at once"


def test_room_is_what_is_free_but_for_gradients(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models the one with gradients has them already."""
    monkeypatch.setattr(memory, "available", lambda: memory.Available(10_000_000, 20_000_000, "this test"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(ours, tiny_base, SpareConfig(Path("unused"), Path("unused"), "test", max_rank=16))
        parameters = [worker._init({"model": name, **LORA}, b"")[0]["parameters"] for name in ("a", "b")]
        assert worker._room(LORA, b"")[0]["free"] == 10_000_000 - 4 * sum(parameters)
        worker._forward_backward({"model": "a", "seq": 1, "forward_only": False}, request(datum(range(9))))
        assert worker._room(LORA, b"")[0]["free"] == 10_000_000 - 4 * parameters[1]


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_any_rank_up_to_the_greatest_trains(tiny_spare: Path, rank: int) -> None:
    """Also one that is no power of two; the one above is refused with the greatest named."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **{**LORA, "rank": rank})
        _, metrics = engine.step("m", 1, request(datum(range(20))))
        assert metrics["grad_norm"] > 0


def _anonymous(pid: int) -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return 1024 * int(match[1])
