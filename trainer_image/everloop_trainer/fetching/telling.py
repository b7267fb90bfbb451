"""Tells the operator how far a fetch is, where the server will tell it everything else: `GET /status` of the pod."""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer

from everloop_trainer.config import PORT
from everloop_trainer.fetching.progress import Progress

TOKEN_FILE = "EVERLOOP_TOKEN_FILE"  # noqa: S105 - the name of a variable
SLOWEST_REQUEST_SECONDS = 5.0


class Telling(ThreadingTCPServer):
    """Answers on the pod's own address, to whoever has the session's token; asks no name server about it."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, ip: str, port: int, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self.token = token
        self._progress: Progress | None = None
        super().__init__((ip, port), _Handler)

    def tell(self, progress: Progress) -> None:
        """From now on this is how far it is."""
        self._progress = progress

    def report(self) -> dict[str, object]:
        """The body of the answer; before the source has said how much there is, it does not say how far it is."""
        progress = self._progress
        come = None if progress is None else {"percent": progress.percent, "totalBytes": progress.total}
        return {"state": "Fetching", "fetching": come}


@contextmanager
def telling(environment: Mapping[str, str]) -> Iterator[Telling | None]:
    """Answers while the block runs; None where nobody has said by which token to be asked. Raises OSError."""
    file, ip = environment.get(TOKEN_FILE, ""), environment.get("POD_IP", "")
    if not file or not ip:
        yield None
        return
    with Telling(ip, PORT, Path(file).read_text().strip()) as server:
        threading.Thread(target=server.serve_forever, daemon=True, name="telling").start()
        try:
            yield server
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Telling
    timeout = SLOWEST_REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.path != "/status":
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, b"")
        elif not self._authorized():
            self._say(HTTPStatus.UNAUTHORIZED, b"")
        else:
            self._say(HTTPStatus.OK, json.dumps(self.server.report()).encode())

    def do_POST(self) -> None:
        self._say(HTTPStatus.SERVICE_UNAVAILABLE, b"")

    do_PUT = do_POST  # noqa: N815 - the base class looks for this name

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return bool(self.server.token) and hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _say(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A question a second is not worth a line."""
