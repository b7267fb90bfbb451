"""The reader over HTTP, on the pod's own address: `/report` wants the token, `/startz` is the startup probe."""

from __future__ import annotations

import hmac
import json
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from .history import Goal
from .reader import Reader

SLOWEST_REQUEST_SECONDS = 5.0
MOST_CONSECUTIVE = 1000


class BadQuestion(ValueError):
    """A question about a goal that can't be understood."""


class Server(ThreadingHTTPServer):
    """Answers for one reader."""

    daemon_threads = True

    def __init__(self, ip: str, port: int, reader: Reader, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self.reader = reader
        self.token = token
        super().__init__((ip, port), Handler)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    timeout = SLOWEST_REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer."""
        parts = urlsplit(self.path)
        if parts.path == "/startz":
            if not self.server.reader.started:
                self.server.reader.report(None)
            self._say(HTTPStatus.OK if self.server.reader.started else HTTPStatus.SERVICE_UNAVAILABLE, b"")
        elif parts.path != "/report":
            self._say(HTTPStatus.NOT_FOUND, b"")
        elif not self._authorized():
            self._say(HTTPStatus.UNAUTHORIZED, b"")
        else:
            try:
                goal = question(parts.query)
            except BadQuestion as error:
                self._say(HTTPStatus.BAD_REQUEST, str(error).encode())
                return
            self._say(HTTPStatus.OK, json.dumps(self.server.reader.report(goal)).encode())

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _say(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A question every other second is not worth a line."""


def question(query: str) -> Goal | None:
    """The goal that a request asks about; None for none. Raises BadQuestion."""
    fields = {name: values[0] for name, values in parse_qs(query).items()}
    if not fields:
        return None
    try:
        goal = Goal(
            fields["metric"], float(fields["value"]), fields["direction"] == "AtLeast", int(fields["consecutive"])
        )
    except (KeyError, ValueError):
        raise BadQuestion("metric, value, direction and consecutive are required") from None
    if not 1 <= goal.consecutive <= MOST_CONSECUTIVE:
        raise BadQuestion("consecutive: between 1 and 1000")
    return goal
