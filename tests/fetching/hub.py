"""The Hugging Face hub, as far as its own client asks for a model: metadata of a commit, and files with ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO, COMMIT = "org/small", "0c351dd01ed87e9c1b53cbc748cba10e6187ff3b"


@dataclass
class Hub:
    """One model; `cut` breaks off the next answer with that file after so many bytes."""

    files: dict[str, bytes]
    token: str = ""
    url: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)

    def metadata(self) -> dict[str, Any]:
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        item: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith(".safetensors"):
            item["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return item


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve()

        def do_HEAD(self) -> None:
            self._serve()

        def _serve(self) -> None:
            path = self.path.partition("?")[0]
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._answer(401, b'{"error": "Invalid credentials"}', {"X-Error-Code": "GatedRepo"})
            elif path in (f"/api/models/{REPO}/revision/main", f"/api/models/{REPO}/revision/{COMMIT}"):
                self._answer(200, json.dumps(hub.metadata()).encode(), {"Content-Type": "application/json"})
            elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
                self._file(path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
            else:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _file(self, name: str) -> None:
            data = hub.files[name]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if found and self.command == "GET":
                hub.ranges.append(found[0])
                start = int(found[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._answer(206, data[start:], headers)
                return
            cut = hub.cut.pop(name, None) if self.command == "GET" else None
            self._answer(200, data, headers, cut)

        def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
