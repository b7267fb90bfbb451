"""`trainers.py POD-LIST SEEN`: the servers of many session pods, each at its own address, in one process.

SEEN says how many of them have been asked.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

PORT = 8080
TELL_SECONDS = 0.2

answers: dict[bytes, bytes] = {}
asked: set[bytes] = set()


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            token = head.lower().partition(b"authorization: bearer ")[2].partition(b"\r\n")[0]
            body = answers.get(token)
            if body is None:
                self._transport.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
                continue
            asked.add(token)
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def tell(seen: Path) -> None:
    beside = seen.with_suffix(".new")
    beside.write_text(str(len(asked)))
    beside.rename(seen)


async def main(pods: Path, seen: Path) -> None:
    loop = asyncio.get_running_loop()
    for line in pods.read_text().splitlines():
        ip, token, report = line.split(" ", 2)
        answers[token.lower().encode()] = report.encode()
        listener = socket.create_server((ip, PORT), backlog=8)
        await loop.create_server(Server, sock=listener)
    while True:
        tell(seen)
        await asyncio.sleep(TELL_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
