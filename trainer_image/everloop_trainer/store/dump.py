"""The history as plain values, for people and tests. Claims nothing and writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.records import BaseSeal, to_header
from everloop_trainer.store import layout
from everloop_trainer.store.bases import read_base
from everloop_trainer.store.epochs import newest_epoch
from everloop_trainer.store.files import Files, PosixFiles
from everloop_trainer.store.sealed import records, seal


def dump(root: Path) -> list[dict[str, Any]]:
    """Every record that counts, in order, of the session stored under `root`; see `shown`.

    Raises:
        FileNotFoundError: nothing is stored there.
        JournalDamaged: names file and offset.
    """
    return shown(PosixFiles(root), str(root))


def shown(files: Files, name: str) -> list[dict[str, Any]]:
    """Every record that counts, in order, of a session's files; `name` is what errors call them.

    Each is the record's header with `incarnation`, `offset` and `body: {bytes, sha256}` (absent when empty), or
    `body: "damaged"`. The journal of the newest incarnation is shown up to its last whole record. A base comes first,
    as one value that says of each stream how many operations and results it holds.

    A session that serves may compact its journal meanwhile, and delete files that were about to be read: then all is
    read again. Raises as `dump`.
    """
    while True:
        before = files.list(layout.JOURNAL)
        try:
            return list(_records(files, name))
        except (OSError, JournalDamaged):
            if files.list(layout.JOURNAL) == before:
                raise


def _records(files: Files, name: str) -> Iterator[dict[str, Any]]:
    newest = newest_epoch(files)
    if newest is None:
        raise FileNotFoundError(f"{name} holds no session")
    lineage = seal(files, newest.number)
    if lineage.base is not None:
        yield _shown_base(files, lineage.base)
    for found in records(files, lineage):
        value: dict[str, Any] = {"incarnation": found.position.incarnation, "offset": found.position.offset}
        value |= to_header(found.record)
        if found.body is None:
            value["body"] = "damaged"
        elif found.body:
            value["body"] = {"bytes": len(found.body), "sha256": hashlib.sha256(found.body).hexdigest()}
        yield value


def _shown_base(files: Files, sealed: BaseSeal) -> dict[str, Any]:
    base = read_base(files, sealed)
    streams = [
        {
            "s": stream.name,
            "done": stream.done,
            "floor": stream.floor,
            "entries": len(stream.entries),
            "owed": len(base.owed[stream.name].numbers),
            "gone": [list(numbers) for numbers in stream.gone],
        }
        for stream in base.streams
    ]
    counts = {"bytes": sealed.length, "sha256": sealed.sha256}
    return {
        "t": "base",
        "n": sealed.incarnation,
        "incarnation": sealed.incarnation,
        "segment": sealed.segment,
        "body": counts,
        "streams": streams,
    }
