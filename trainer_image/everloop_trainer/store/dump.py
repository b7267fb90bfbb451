"""The history as plain values, for people and tests. Claims nothing and writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everloop_trainer.session.records import BaseSeal, to_header
from everloop_trainer.store.bases import read_base
from everloop_trainer.store.epochs import newest_epoch
from everloop_trainer.store.files import Files, PosixFiles
from everloop_trainer.store.sealed import records, seal


def dump(root: Path) -> Iterator[dict[str, Any]]:
    """Every record that counts, in order, of the session stored under `root`.

    Each is the record's header with `incarnation`, `offset` and `body: {bytes, sha256}` (absent when empty), or
    `body: "damaged"`. The
    journal of the newest incarnation is shown up to its last whole record. A base comes first, as one value that says
    of each stream how many operations and results it holds.

    Raises:
        FileNotFoundError: nothing is stored there.
        JournalDamaged: names file and offset.
    """
    files = PosixFiles(root)
    newest = newest_epoch(files)
    if newest is None:
        raise FileNotFoundError(f"{root} holds no session")
    lineage = seal(files, newest.number)
    if lineage.base is not None:
        yield _shown_base(files, lineage.base)
    for found in records(files, lineage):
        shown: dict[str, Any] = {"incarnation": found.position.incarnation, "offset": found.position.offset}
        shown |= to_header(found.record)
        if found.body is None:
            shown["body"] = "damaged"
        elif found.body:
            shown["body"] = {"bytes": len(found.body), "sha256": hashlib.sha256(found.body).hexdigest()}
        yield shown


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
