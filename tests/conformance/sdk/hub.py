"""What stands for the Hugging Face Hub: it knows who asks, and has nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/api/whoami-v2"
        body = json.dumps({"type": "user", "name": "conformance"} if known else {"error": "not found"}).encode()
        self.send_response(200 if known else 404)
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
