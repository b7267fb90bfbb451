"""A machine that may lose power: what below a directory is written, named and flushed, from call to call of the system.

`Recorder` takes the place of the functions of `os` and notes each effect below its directory; what the outside learns
meanwhile is noted between them. `Machine` plays such a history again and says what a disk may hold after any part of
it. Nothing is on disk by itself: neither bytes before the flush of their file, nor names, new or removed, before that
of their directory.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.store.crash_files import Died

ROOT = 0


@dataclass(frozen=True)
class Name:
    """A name in a directory now means this file or directory, or nothing."""

    directory: int
    name: str
    child: int | None


@dataclass(frozen=True)
class Made:
    """A file or directory came to be, without a name so far."""

    node: int
    is_directory: bool


@dataclass(frozen=True)
class Write:
    """Bytes were appended to a file."""

    node: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """A file or a directory was flushed."""

    node: int


@dataclass(frozen=True)
class Learned:
    """The outside was told something."""

    what: Any


Event = Name | Made | Write | Sync | Learned


class Recorder:
    """Notes what happens below `root`, an existing empty directory, while `recording` is entered.

    Attributes:
        events: all of it, in order.
        die_at: number of the effect (from 1) at which the process is killed: before it, that is with none of it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self.effects = 0
        self.die_at: int | None = None
        self.dead = False
        self._lock = threading.RLock()
        self._nodes = {Path(): ROOT}
        self._made = 1
        self._open: dict[int, int] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    def revive(self) -> None:
        """Another process goes on below the same directory; what the dead one wrote is there."""
        self.dead, self.die_at = False, None

    def learned(self, what: Any) -> None:
        """The outside was told something."""
        with self._lock:
            self.events.append(Learned(what))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, the functions of `os` that change files are noted."""
        ours = {
            "open": self._open_file,
            "close": self._close,
            "write": self._write,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "link": self._link,
            "rename": self._rename,
            "unlink": self._remove,
            "rmdir": self._remove_directory,
            "mkdir": self._mkdir,
        }
        self._real = {name: getattr(os, name) for name in ours}
        with ExitStack() as replaced:
            for name, function in ours.items():
                replaced.enter_context(mock.patch.object(os, name, function))
            yield
        assert tree(self.root) == Machine.after(self.events).tree(), "something was written past the recorder"

    def _inside(self, path: Any, dir_fd: int | None = None) -> Path | None:
        whole = Path(os.fsdecode(path))
        if dir_fd is not None and not whole.is_absolute():
            whole = Path(f"/proc/self/fd/{dir_fd}").readlink() / whole
        whole = whole if whole.is_absolute() else Path.cwd() / whole
        return whole.relative_to(self.root) if whole.is_relative_to(self.root) else None

    def _effect(self) -> None:
        if self.dead:
            raise Died("this process is dead")
        self.effects += 1
        if self.effects == self.die_at:
            self.dead = True
            raise Died(f"killed before effect {self.effects}")

    def _name(self, path: Path, node: int | None) -> None:
        if node is None:
            del self._nodes[path]
        else:
            self._nodes[path] = node
        self.events.append(Name(self._nodes[path.parent], path.name, node))

    def _new(self, path: Path, *, is_directory: bool) -> int:
        node, self._made = self._made, self._made + 1
        self.events.append(Made(node, is_directory))
        self._name(path, node)
        return node

    def _open_file(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._lock:
            inside = self._inside(path, dir_fd)
            is_new = bool(flags & os.O_CREAT) and inside is not None and inside not in self._nodes
            if is_new:
                self._effect()
            descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if inside is not None:
                assert not flags & os.O_TRUNC, "files are written once"
                self._open[descriptor] = self._new(inside, is_directory=False) if is_new else self._nodes[inside]
            return descriptor

    def _close(self, descriptor: int) -> None:
        with self._lock:
            self._open.pop(descriptor, None)
            self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        with self._lock:
            node = self._open.get(descriptor)
            if node is not None:
                self._effect()
            written: int = self._real["write"](descriptor, data)
            if node is not None:
                self.events.append(Write(node, bytes(memoryview(data).cast("B")[:written])))
            return written

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            node = self._open.get(descriptor)
            if node is not None:  # what is really on disk does not matter here
                self._effect()
                self.events.append(Sync(node))

    def _link(self, source: Any, target: Any) -> None:
        with self._lock:
            old, new = self._inside(source), self._inside(target)
            if old is not None and new is not None:
                self._effect()
            self._real["link"](source, target)
            if old is not None and new is not None:
                self._name(new, self._nodes[old])

    def _rename(self, source: Any, target: Any) -> None:
        with self._lock:
            old, new = self._inside(source), self._inside(target)
            if old is not None and new is not None:
                self._effect()
            self._real["rename"](source, target)
            if old is not None and new is not None:
                self._name(new, self._nodes[old])
                self._name(old, None)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("unlink", path, dir_fd)

    def _remove_directory(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("rmdir", path, dir_fd)

    def _removed(self, function: str, path: Any, dir_fd: int | None) -> None:
        with self._lock:
            inside = self._inside(path, dir_fd)
            if inside is not None:
                self._effect()
            self._real[function](path, dir_fd=dir_fd)
            if inside is not None:
                self._name(inside, None)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._lock:
            inside = self._inside(path, dir_fd)
            if inside is not None and inside not in self._nodes:
                self._effect()
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            if inside is not None:
                self._new(inside, is_directory=True)


Tree = dict[str, bytes | None]
"""Content of files by path; None for a directory."""


def tree(root: Path) -> Tree:
    """What lies below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@dataclass
class _Node:
    """`durable` is on disk; `pending` came after that, in order: any part of it may be there too."""

    is_directory: bool
    names: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, list[int | None]] = field(default_factory=dict)
    content: bytes = b""
    written: list[bytes] = field(default_factory=list)

    def sync(self) -> None:
        for name, history in self.renamed.items():
            _put(self.names, name, history[-1])
        self.renamed.clear()
        self.content += b"".join(self.written)
        self.written.clear()


def _put(names: dict[str, int], name: str, child: int | None) -> None:
    if child is None:
        names.pop(name, None)
    else:
        names[name] = child


@dataclass
class Machine:
    """A disk below a directory, and what the outside has learned."""

    nodes: dict[int, _Node] = field(default_factory=lambda: {ROOT: _Node(is_directory=True)})
    learned: list[Any] = field(default_factory=list)

    @classmethod
    def after(cls, events: list[Event]) -> Machine:
        """The machine after these."""
        machine = cls()
        for event in events:
            machine.take(event)
        return machine

    def take(self, event: Event) -> None:
        """One event more."""
        match event:
            case Made():
                self.nodes[event.node] = _Node(event.is_directory)
            case Name():
                self.nodes[event.directory].renamed.setdefault(event.name, []).append(event.child)
            case Write():
                self.nodes[event.node].written.append(event.data)
            case Sync():
                self.nodes[event.node].sync()
            case Learned():
                self.learned.append(event.what)

    def tree(self) -> Tree:
        """What processes see: everything."""
        return self._tree(lambda history: history[-1], b"".join)

    def durable(self) -> Tree:
        """What is left when power is lost and nothing is there that was not flushed."""
        return self._tree(None, lambda _: b"")

    def survivor(self, chance: random.Random) -> Tree:
        """What may be left: of what was not flushed any part, torn, with holes, in any order."""
        return self._tree(chance.choice, lambda written: _torn(written, chance), chance)

    def _tree(
        self,
        choose: Callable[[list[int | None]], int | None] | None,
        keep: Callable[[list[bytes]], bytes],
        chance: random.Random | None = None,
    ) -> Tree:
        found: Tree = {}

        def visit(node: _Node, path: str) -> None:
            names = dict(node.names)
            for name, history in node.renamed.items():
                before = node.names.get(name)
                if choose is not None:
                    _put(names, name, choose([before, *history] if chance is not None else history))
            for name, child in sorted(names.items()):
                below = self.nodes[child]
                found[path + name] = None if below.is_directory else below.content + keep(below.written)
                if below.is_directory:
                    visit(below, f"{path}{name}/")

        visit(self.nodes[ROOT], "")
        return found


def _torn(written: list[bytes], chance: random.Random) -> bytes:
    """Blocks that never reached the disk read as zeros, unless the file ends before them."""
    kept = bytearray()
    for data in written:
        torn = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        start, end = torn if chance.random() < 0.5 else (0, len(data))
        kept += bytes(start) + data[start:end] + bytes(len(data) - end)
    return bytes(kept[: chance.randint(0, len(kept))]) if chance.random() < 0.5 else bytes(kept)


def lay_out(content: Tree, root: Path) -> None:
    """Make a directory of it."""
    root.mkdir(parents=True)
    for name, data in content.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
