"""A directory of the model cache: filled once, by one pod at a time, and there only when it is whole.

Files gather in a directory beside it whose name begins with a dot, so that whoever comes after a killed one goes on
from what is there. The lock is flock(2): it ends with its holder, also with the holder's node.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import structlog

from everloop_trainer.durable import Directories, sync_directory
from everloop_trainer.fetching.files import CHUNK, FetchFailed, Source, SourceFile, is_whole
from everloop_trainer.fetching.progress import Progress

RECORD = ".everloop.json"
"""In a whole directory: which source and revision its files are of, with their hashes."""
STREAMS = 4
TELL_SECONDS = 10.0
LOCK_SECONDS = 1.0
log = structlog.get_logger(__name__)


def fill(directory: Path, source: Source, begun: Callable[[Progress], None] = lambda _: None) -> None:
    """Makes `directory` hold the files of `source`, if it does not yet; calls `begun` once it is known how much it is.

    Raises:
        FetchFailed: the source does not give them; what has come stays for the next try.
        OSError: the volume failed.
    """
    if is_filled(directory):
        log.info("the base model is in the cache", directory=str(directory))
        return
    Directories().make(directory.parent)
    with _lock(directory.with_name(f".{directory.name}.lock")):
        if is_filled(directory):
            return
        _fill(directory, source, begun)


def is_filled(directory: Path) -> bool:
    """Whether the directory is whole: it gets its name last."""
    return (directory / RECORD).is_file()


def _fill(directory: Path, source: Source, begun: Callable[[Progress], None]) -> None:
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir(exist_ok=True)
    revision, files = source.files()
    if not files:
        raise FetchFailed(f"{source.title}: there are no files of a model")
    progress = Progress(partial, sum(file.size for file in files))
    begun(progress)
    with _told(source.title, progress), ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(lambda file: _fetch(source, file, partial), files))
    record = {
        "format": 1,
        "source": source.title,
        "revision": revision,
        "files": [_described(partial, file) for file in files],
    }
    _flush(partial, files)
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    _sync_file(partial / RECORD)
    sync_directory(partial)
    partial.rename(directory)
    sync_directory(directory.parent)
    log.info("the base model has come", directory=str(directory), revision=revision, files=len(files))


def _fetch(source: Source, file: SourceFile, partial: Path) -> None:
    target = partial / file.name
    if not target.resolve().is_relative_to(partial.resolve()):
        raise FetchFailed(f"{source.title}: {file.name!r} lies outside of the model")
    if is_whole(target, file):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source.fetch(file, partial)
    if not is_whole(target, file):
        target.unlink(missing_ok=True)
        raise FetchFailed(f"{source.title}: {file.name} came damaged ({file.check} differs); it is fetched anew")


def _described(partial: Path, file: SourceFile) -> dict[str, object]:
    with (partial / file.name).open("rb") as content:
        digest = hashlib.sha256()
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return {"name": file.name, "bytes": file.size, "sha256": digest.hexdigest()}


def _flush(partial: Path, files: Sequence[SourceFile]) -> None:
    for file in files:
        _sync_file(partial / file.name)
    for directory in {(partial / file.name).parent for file in files}:
        sync_directory(directory)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(title: str, progress: Progress) -> Iterator[None]:
    """Says in the log how far it is, as long as it goes on."""
    ended = Event()

    def tell() -> None:
        while not ended.wait(TELL_SECONDS):
            log.info("fetching", source=title, bytes=progress.bytes, of=progress.total)

    teller = Thread(target=tell, daemon=True)
    log.info("fetching", source=title, bytes=progress.bytes, of=progress.total)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one pod at a time, of whatever node. Raises FetchFailed where the volume has no flock(2)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        waited = 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise FetchFailed(
                        f"{path}: the volume of the model cache has no flock: {error.strerror}"
                    ) from error
            if waited % TELL_SECONDS == 0:
                log.info("another pod fills the cache: waiting for it", lock=str(path), seconds=waited)
            time.sleep(LOCK_SECONDS)
            waited += LOCK_SECONDS
        yield
    finally:
        os.close(descriptor)
