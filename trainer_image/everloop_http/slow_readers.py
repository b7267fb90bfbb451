"""Clients that do not take their answers: how much memory they hold together, and for how long.

An answer is handed over whole, and what its client has not taken yet lies in the connection's buffer. A client that
never takes it would hold it for ever: its kernel answers for it as long as it lives. Whoever is cut off asks again.

Gateways take answers at once: whoever of a session pod does not is no gateway that runs, or is cut off from it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED_SECONDS = 30.0
"""A client that takes nothing for so long is gone; the SDK itself reads at once."""
LONGEST_SECONDS = 120.0
"""An attempt of the SDK ends after that: nobody waits any longer."""
LOOK_SECONDS = 5.0
UNSENT_BYTES = 128 << 10
"""What the kernel holds of one connection beside what is on its way."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """A client that is behind: since when, when it last took something (seconds of one clock), and bytes that wait."""

    since: float
    moved: float
    held: int


def to_cut(readers: Sequence[Reader], now: float, most_bytes: int) -> set[int]:
    """Which of them are cut off: who is too slow, and then who has taken nothing for longest, until the rest has room.

    Of those that have all just taken something the last to come go: the others are nearer to their end, and where
    everybody is slow somebody must come to one. For the same reason a single one may hold more.
    """
    cut = {
        index
        for index, reader in enumerate(readers)
        if now - reader.moved >= STALLED_SECONDS or now - reader.since >= LONGEST_SECONDS
    }
    held = 0
    for index in sorted(
        set(range(len(readers))) - cut, key=lambda each: (-readers[each].moved, readers[each].since, each)
    ):
        if held and held + readers[index].held > most_bytes:
            cut.add(index)
        else:
            held += readers[index].held
    return cut


class SlowReaders:
    """The connections whose clients are behind. Needs a running event loop once there is one.

    Args:
        most_bytes: of all answers that wait for their clients, beyond what the kernel holds.
        clock: seconds.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._readers: dict[asyncio.Transport, Reader] = {}
        self._timer: asyncio.TimerHandle | None = None

    def behind(self, transport: asyncio.Transport) -> None:
        """More waits for this client than the transport likes."""
        now = self._clock()
        self._readers.setdefault(transport, Reader(now, now, transport.get_write_buffer_size()))
        self._look()

    def caught_up(self, transport: asyncio.Transport) -> None:
        """It has taken nearly all, or is gone."""
        self._readers.pop(transport, None)

    def _look(self) -> None:
        now = self._clock()
        for transport, reader in self._readers.items():
            held = transport.get_write_buffer_size()
            self._readers[transport] = Reader(reader.since, now if held < reader.held else reader.moved, held)
        transports = list(self._readers)
        for index in to_cut(list(self._readers.values()), now, self._most_bytes):
            reader = self._readers.pop(transports[index])
            log.warning("connection cut: its client does not take its answer", bytes=reader.held)
            transports[index].abort()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look) if self._readers else None


def http_protocol(readers: SlowReaders) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, whose connections say when their clients are behind."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LONGEST_SECONDS))
            super().connection_made(transport)

        def pause_writing(self) -> None:
            super().pause_writing()
            readers.behind(self.transport)

        def resume_writing(self) -> None:
            readers.caught_up(self.transport)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            readers.caught_up(self.transport)
            super().connection_lost(exc)

    return Protocol
