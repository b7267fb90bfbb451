"""A fixed address before one that changes: what the cluster's DNS is for clients, which the local cluster lacks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHUNK = 1 << 16


@contextmanager
def relay(target: Callable[[], tuple[str, int]]) -> Iterator[str]:
    """Forwards each connection to where `target` says at that moment; yields the URL. OSError there closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, target), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _accept(listener: socket.socket, target: Callable[[], tuple[str, int]]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_forward, args=(client, target), daemon=True).start()


def _forward(client: socket.socket, target: Callable[[], tuple[str, int]]) -> None:
    with client:
        try:
            server = socket.create_connection(target(), timeout=5)
        except OSError:
            return
        with server:
            server.settimeout(None)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side was faster
                pass
