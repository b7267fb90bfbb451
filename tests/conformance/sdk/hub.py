"""What stands for the Hugging Face Hub: it knows who asks, has nothing, and takes what is committed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMITTED: set[str] = set()
"""Names of the files that were committed to any repository."""


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/api/whoami-v2"
        self._answer(
            200 if known else 404, {"type": "user", "name": "conformance"} if known else {"error": "not found"}
        )

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        told = [json.loads(line) for line in lines]
        here = f"http://{self.headers['Host']}/conformance/adapter"
        if "/commit/" in self.path:
            COMMITTED.update(each["value"]["path"] for each in told if each["key"] == "file")
            self._answer(200, {"commitUrl": f"{here}/commit/1", "commitOid": "1", "success": True})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in told[0]["files"]
            ]
            self._answer(200, {"files": files})
        else:
            self._answer(200, {"url": here})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


def start() -> str:
    """Its address; it ends with the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
