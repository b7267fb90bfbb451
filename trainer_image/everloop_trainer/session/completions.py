"""Which samples of a client have ended, for one who waits for all of them with one call. Pure bookkeeping in memory.

A client is one of a sampling session: its numbers are those of a block of 10^9. From its first question on, what ends
is listed in that order, and a cursor says how far the client has read. The cursor of another incarnation says nothing
here: the list begins with everything that has ended and that nobody has fetched, so that nothing is missing in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from everloop_trainer.session.identifiers import request_id
from everloop_trainer.session.streams import Entry, Stream

BLOCK = 10**9
"""Numbers of one client of a sampling session (SDK, `SamplingClient._request_id_counter`)."""
MOST_LOST = 8192
"""More samples than a client is likely to wait for at once."""
_INCARNATION = 2**32
"""A cursor is the incarnation's number times this, and how many completions were read."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended: whether it was sampled, and the bytes of the result where they are known."""

    request_id: str
    ok: bool
    size: int | None = None


@dataclass(slots=True)
class _Listed:
    """What has ended of one client, but for the first `read`, which the client has."""

    completions: list[Completion]
    read: int = 0


@dataclass(slots=True)
class Completions:
    """The lists of all clients that have asked. `incarnation` is its number."""

    incarnation: int
    _lists: dict[tuple[str, int], _Listed] = field(default_factory=dict)

    def ended(self, entry: Entry, size: int) -> None:
        """A sample has ended; its result has so many bytes."""
        listed = self._lists.get((entry.stream, entry.seq // BLOCK))
        if listed is not None and entry.ended is not None:
            listed.completions.append(Completion(entry.request_id, entry.ended.result.ok, size))

    def after(self, cursor: int, stream: Stream, client: int, *, lost: bool) -> tuple[list[Completion], int]:
        """What has ended behind a cursor, and the cursor behind that; what lies before it is forgotten.

        With `lost`, what was accepted may have gone with a storage: unknown numbers around the highest that is known
        count as failed, and whoever fetches their results learns that they are unknown, or waits for them there.
        """
        key = stream.name, client
        listed = self._lists.get(key)
        if listed is None:
            listed = self._lists[key] = _Listed(list(_unfetched(stream, client, lost=lost)))
        incarnation, read = divmod(cursor, _INCARNATION)
        if incarnation == self.incarnation:
            new = min(max(read - listed.read, 0), len(listed.completions))
            del listed.completions[:new]
            listed.read += new
        return list(listed.completions), self.incarnation * _INCARNATION + listed.read + len(listed.completions)


def _unfetched(stream: Stream, client: int, *, lost: bool) -> Iterator[Completion]:
    numbers = range(client * BLOCK, (client + 1) * BLOCK)
    ended = {seq: entry.ended.result.ok for seq, entry in stream.entries.items() if entry.ended is not None}
    ended |= dict.fromkeys(stream.owed.numbers, True)  # or failed: its result says so
    for seq, ok in ended.items():
        if seq in numbers and seq not in stream.fetched:
            yield Completion(request_id(stream.name, seq), ok)
    if lost:
        highest = max((seq for seq in (*stream.entries, *stream.owed.numbers) if seq in numbers), default=numbers.start)
        for seq in range(max(numbers.start, highest - MOST_LOST), min(numbers.stop, highest + MOST_LOST)):
            if not stream.knows(seq):
                yield Completion(request_id(stream.name, seq), ok=False)
