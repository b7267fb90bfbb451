"""A disk in memory that knows what was flushed, and that can die at any of its writes.

`Disk` is what outlives processes. `CrashFiles` is the file layer of one process on it. A process can be killed (the
operating system keeps what was written) or the machine can lose power (`Disk.lose_power`: only what was flushed
stays, and of the rest any part, in any order).
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from everloop_trainer.store.files import AppendFile


class Died(OSError):
    """The process of this file layer is dead: nothing that it does reaches the disk any more."""


@dataclass
class _Content:
    flushed: bytes = b""
    written: bytes = b""


@dataclass
class Disk:
    """Files by path. Entries made by `create` are durable at once, as the real layer's are.

    Threads add files while others look: who walks through `files` walks through a copy.
    """

    files: dict[str, _Content] = field(default_factory=dict)

    def lose_power(self, chaos: random.Random | None = None) -> None:
        """Forget what was not flushed; with `chaos`, keep a random part of it, with holes and stale bytes."""
        for content in self.files.values():
            tail = content.written[len(content.flushed) :]
            if chaos is not None and tail:
                kept = bytearray(tail[: chaos.randint(0, len(tail))])
                for _ in range(chaos.randint(0, 2)):  # blocks that never reached the disk read as zeros
                    if kept:
                        start = chaos.randrange(len(kept))
                        end = min(len(kept), start + chaos.randint(1, 64))
                        kept[start:end] = bytes(end - start)
                tail = bytes(kept)
            else:
                tail = b""
            content.written = content.flushed = content.flushed + tail


@dataclass
class CrashFiles:
    """store.files.Files on a Disk.

    Attributes:
        die_at: number of the effect (from 1) at which the process dies.
        after: whether it dies right after that effect rather than before it.
        ignore_flushes: act as if fdatasync did nothing: what a missing flush would do.
    """

    disk: Disk
    die_at: int | None = None
    after: bool = False
    ignore_flushes: bool = False
    effects: int = 0
    dead: bool = False
    flushes: int = 0
    fail_flush: bool = False
    refuse: int | None = None
    """While set, nothing can be written: this errno, as of a full, over-quota or read-only file system."""
    full_at: int | None = None
    """Number of the effect from which on the disk is full."""
    torn: int = 0
    """How many bytes of a refused append still reach the file."""
    hanging: str = ""
    """While set, whatever touches a path that holds this hangs, until `thaw`."""
    on_flush: Callable[[], None] | None = None
    """Called on the flushing thread before each flush takes effect; may block or act as another process."""
    _thawing: threading.Condition = field(default_factory=threading.Condition)

    def effect(self) -> _Effect:
        """Count an effect; die before or after it if this is the one."""
        return _Effect(self)

    def kill(self) -> None:
        """End the process: every further call fails."""
        self.dead = True

    def hangs(self, path: str) -> bool:
        """Whether that does not answer just now."""
        return bool(self.hanging) and self.hanging in path

    def reach(self, path: str) -> None:
        """On a thread: wait until the path answers."""
        with self._thawing:
            self._thawing.wait_for(lambda: not self.hangs(path))

    def thaw(self) -> None:
        """Let everything that hangs go on."""
        with self._thawing:
            self.hanging = ""
            self._thawing.notify_all()

    def check(self) -> None:
        """Raise if the process is dead."""
        if self.dead:
            raise Died("this process is dead")

    def refuse_writes(self, path: str) -> None:
        """Raise if the file system takes none."""
        if self.refuse is not None:
            raise OSError(self.refuse, os.strerror(self.refuse), path)

    def create(self, path: str, data: bytes) -> None:
        self.reach(path)
        with self.effect():
            if path in self.disk.files:
                raise FileExistsError(path)
            self.refuse_writes(path)
            self.disk.files[path] = _Content(data, data)

    def open_append(self, path: str) -> AppendFile:
        with self.effect():
            if path in self.disk.files:
                raise FileExistsError(path)
            self.refuse_writes(path)
            self.disk.files[path] = _Content()
        return _Appending(self, self.disk.files[path])

    def open_read(self, path: str) -> IO[bytes]:
        self.check()
        if path not in self.disk.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self.disk.files[path].written)

    def exists(self, path: str) -> bool:
        self.reach(path)
        self.check()
        return path in self.disk.files or any(name.startswith(path + "/") for name in list(self.disk.files))

    def list(self, path: str) -> list[str]:
        self.check()
        below = [name[len(path) + 1 :] for name in list(self.disk.files) if name.startswith(path + "/")]
        return sorted({name.partition("/")[0] for name in below})

    def sync(self, path: str) -> None:
        with self.effect():
            if path not in self.disk.files:
                raise FileNotFoundError(path)
            content = self.disk.files[path]
            content.flushed = content.written

    def sha256(self, path: str) -> tuple[str, int]:
        with self.open_read(path) as file:
            data = file.read()
        return hashlib.sha256(data).hexdigest(), len(data)

    def delete(self, path: str) -> None:
        with self.effect():
            for name in [name for name in list(self.disk.files) if name.startswith(path + "/")]:
                del self.disk.files[name]

    def remove(self, path: str) -> None:
        with self.effect():
            self.disk.files.pop(path, None)

    def absolute(self, path: str) -> str:
        return "/disk/" + path

    def write_state(self, path: str, data: bytes) -> None:
        """As an engine of this process does."""
        self.create(path.removeprefix("/disk/"), data)


class _Effect:
    def __init__(self, files: CrashFiles) -> None:
        self._files = files

    def __enter__(self) -> None:
        files = self._files
        files.check()
        files.effects += 1
        if files.full_at is not None and files.effects >= files.full_at:
            files.refuse = errno.ENOSPC
        if files.effects == files.die_at and not files.after:
            files.dead = True
            raise Died(f"died before effect {files.effects}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        files = self._files
        if kind is None and files.effects == files.die_at and files.after:
            files.dead = True
            raise Died(f"died after effect {files.effects}")


class _Appending:
    def __init__(self, files: CrashFiles, content: _Content) -> None:
        self._files = files
        self._content = content

    def append(self, data: bytes) -> None:
        with self._files.effect():
            if self._files.refuse is not None:
                self._content.written += data[: self._files.torn]
            self._files.refuse_writes("journal")
            self._content.written += data

    def flush(self) -> None:
        with self._files.effect():
            self._files.flushes += 1
            if self._files.on_flush is not None:
                self._files.on_flush()
            if self._files.fail_flush:
                raise OSError(5, "Input/output error")
            if not self._files.ignore_flushes:
                self._content.flushed = self._content.written

    def close(self) -> None:
        """Nothing is flushed by closing."""
