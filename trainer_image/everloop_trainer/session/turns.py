"""Whose turn it is: keys take turns, and of a key its streams. Pure bookkeeping.

The order between streams is nobody's promise: each stream's own order, and what its operations come to, do not depend
on it. So nothing of this is journaled, and a later incarnation begins a round of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from everloop_trainer.session.identifiers import session_of

T = TypeVar("T")


@dataclass(slots=True)
class Keys:
    """By whose key a stream was made, as far as that was heard; a client's session is of one key for ever."""

    _of_session: dict[str, str] = field(default_factory=dict)

    def hear(self, stream: str, key: str) -> bool:
        """A call about this stream came with this key; returns whether that is new."""
        session = session_of(stream)
        if self._of_session.get(session) == key:
            return False
        self._of_session[session] = key
        return True

    def of(self, stream: str) -> str:
        """The id of the key, or the client's session while its key is not known."""
        session = session_of(stream)
        return self._of_session.get(session, session)

    def known(self, stream: str) -> str | None:
        """The id of the key, if it is known."""
        return self._of_session.get(session_of(stream))


class Turns:
    """Streams that may have something to run; a key with a thousand of them gets as many turns as one with one.

    `key_of` says whose a stream is.
    """

    def __init__(self, key_of: Callable[[str], str]) -> None:
        self._key_of = key_of
        self._rounds: dict[str, dict[str, None]] = {}

    def offer(self, stream: str) -> None:
        """It may have something; a stream that is offered already keeps its place."""
        self._rounds.setdefault(self._key_of(stream), {}).setdefault(stream)

    def regroup(self) -> None:
        """What is known of keys has changed."""
        streams = [stream for streams in self._rounds.values() for stream in streams]
        self._rounds = {}
        for stream in streams:
            self.offer(stream)

    def take(self, look: Callable[[str], T | None], over: Callable[[str], bool]) -> T | None:
        """What the first stream that is ready has, in the order of turns; its key has its next one after all others.

        Args:
            look: what a stream has that may run now.
            over: whether a stream has nothing left at all; it is forgotten until it is offered again.
        """
        for key, streams in list(self._rounds.items()):
            for stream in list(streams):
                if over(stream):
                    del streams[stream]
                    continue
                found = look(stream)
                if found is not None:
                    del streams[stream], self._rounds[key]
                    streams[stream] = None
                    self._rounds[key] = streams
                    return found
            if not streams:
                del self._rounds[key]
        return None
