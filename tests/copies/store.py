"""An S3 server of its own process, and a proxy before it that fails, delays and counts single requests."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.prepared import s3_server

ACCESS, SECRET, BUCKET = "test-access", "test-secret-0123456789", "copies"
REGION = "us-east-1"
START_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """One request as the proxy sees it."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def kind(self) -> str:
        """What it does, in the words of the protocol."""
        query = self.path.partition("?")[2]
        if self.method == "PUT":
            return "UploadPart" if "partNumber=" in query else "PutObject"
        if self.method == "POST":
            return "CreateMultipartUpload" if query.startswith("uploads") else "CompleteMultipartUpload"
        if self.method == "DELETE":
            return "AbortMultipartUpload" if "uploadId=" in query else "DeleteObject"
        return self.method

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


Fault = Callable[[Request], bytes | float | None]
"""The body of an error to answer instead, seconds to wait before it is passed on, or None."""


def error(code: str, status: int = 500) -> bytes:
    """An S3 error's body; its status is put before it."""
    return (
        f"{status} <?xml version='1.0'?><Error><Code>{code}</Code><Message>made by the test</Message></Error>".encode()
    )


@dataclass
class Store:
    """The server behind its proxy."""

    directory: Path
    url: str
    port: int
    requests: list[Request] = field(default_factory=list)
    fault: Fault | None = None
    blocked: threading.Event = field(default_factory=threading.Event)

    def client(self) -> Any:
        """A client of the tests' own, with the right credentials."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )

    def objects(self, prefix: str = "") -> list[str]:
        """Names of all objects below a prefix."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def content(self, key: str) -> bytes:
        body: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body

    def unfinished(self) -> list[str]:
        """Keys of multipart uploads that were begun and not ended."""
        return [item["Key"] for item in self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]

    def written(self) -> list[str]:
        """What was asked for that changes something, in order."""
        return [f"{request.kind} {request.path.partition('?')[0]}" for request in self.requests if request.writes]

    def credentials(self, directory: Path, access: str = ACCESS, secret: str = SECRET) -> Path:
        """A mounted Secret, as the pod sees it; written again, it is rotated."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "AWS_SECRET_ACCESS_KEY").write_text(secret)
        (directory / "AWS_ACCESS_KEY_ID").write_text(access)
        return directory

    def s3(self, credentials: Path, prefix: str) -> dict[str, str]:
        """`copies.s3` of the trainer's configuration."""
        uri = f"s3://{BUCKET}/{prefix}"
        return {"uri": uri, "region": REGION, "endpointUrl": self.url, "credentialsDir": str(credentials)}


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def _pass(self) -> None:
        store = self.store
        request = Request(self.command, self.path, dict(self.headers))
        store.requests.append(request)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        fault = store.fault(request) if store.fault is not None else None
        if isinstance(fault, float):
            store.blocked.set()
            time.sleep(fault)
        elif fault is not None:
            status, _, content = fault.partition(b" ")
            self._answer(int(status), {"Content-Type": "application/xml"}, content)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", store.port, timeout=60)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            upstream.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                if not re.fullmatch("(?i)connection|transfer-encoding|content-length|date|server", name):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the client was killed

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(directory: Path) -> Iterator[Store]:
    """An S3 server with one empty bucket."""
    objects = directory / "objects"
    objects.mkdir(parents=True)
    port = _free_port()
    environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET}
    sidecar = directory / "sidecar"
    sidecar.mkdir()
    command = [str(s3_server()), "--port", f"127.0.0.1:{port}", "--region", REGION, "--quiet", "posix"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--sidecar", str(sidecar), str(objects)], env=environment, stdout=log, stderr=log
        )
    proxy = _Server(("127.0.0.1", 0), _Proxy)
    store = Store(objects, f"http://127.0.0.1:{proxy.server_address[1]}", port)
    proxy.RequestHandlerClass = type("Proxy", (_Proxy,), {"store": store})
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    try:
        _wait(port, process, directory / "log")
        thread.start()
        store.client().create_bucket(Bucket=BUCKET)
        yield store
    finally:
        if thread.is_alive():
            proxy.shutdown()
            thread.join()
        proxy.server_close()
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"the S3 server did not start: {log.read_text()[-2000:]}")
