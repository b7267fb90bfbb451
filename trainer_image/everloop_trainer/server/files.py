"""What of a checkpoint can be downloaded, for the gateway, which lets only those have it who may.

External weights are the files of a PEFT directory, the other kinds one archive. None of it ever changes: a file is
asked for by the key of its checkpoint as well, so that what was begun is never continued with the bytes of another one
that has got the same name since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from everloop_trainer import archives, peftfiles
from everloop_trainer.about import About
from everloop_trainer.server.gate import Gate
from everloop_trainer.session.identifiers import tinker_path
from everloop_trainer.session.keeping import NoCheckpoint

EXTERNAL = "external_weights"
log = structlog.get_logger(__name__)
_BYTES = "application/octet-stream"
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


@dataclass(frozen=True, slots=True)
class _Stored:
    kind: str
    state: Path
    about: About

    @property
    def key(self) -> str:
        return self.state.parent.name

    async def names(self) -> list[str]:
        """None if it is deleted this moment. In threads that hang with the storage at nobody's expense."""
        if self.kind != EXTERNAL:
            return [archives.NAME]
        try:
            return await run_in_threadpool(peftfiles.present, self.state.parent)
        except FileNotFoundError:
            return []


class FileRoutes:
    """The names of files, and each of them as it is or in part."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def routes(self) -> list[Route]:
        """All of them."""
        files = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/files"
        return [Route(files, self.names), Route(f"{files}/{{key}}/{{file}}", self.content)]

    async def names(self, request: Request) -> Response:
        """What there is, and the key to ask for it by."""
        stored = await self._stored(request)
        return JSONResponse({"key": stored.key, "files": await stored.names()})

    async def content(self, request: Request) -> Response:
        """One file; of a range of its bytes, if the request names one."""
        stored, parts = await self._stored(request), request.path_params
        if parts["key"] != stored.key or parts["file"] not in await stored.names():
            raise _gone()
        if stored.kind == EXTERNAL:
            return FileResponse(stored.state.with_name(parts["file"]), media_type=_BYTES)
        try:
            content = await run_in_threadpool(archives.archive, stored.state, stored.about)
        except FileNotFoundError:
            raise _gone() from None
        except archives.NoAdapter as damage:
            log.error("no archive of a damaged checkpoint", error=str(damage))
            raise HTTPException(404, "file: the storage does not hold it as it was saved") from None
        return _archive(content, stored.key, request)

    async def _stored(self, request: Request) -> _Stored:
        parts, service = request.path_params, self._gate.service
        path = tinker_path(parts["run"], parts["kind"], parts["name"])
        try:
            stored = _Stored(parts["kind"], *service.keeping.state(path))
        except NoCheckpoint:
            stored = None
        await self._gate.call(service.still_ours())
        if stored is None:
            raise HTTPException(404, f"checkpoint: there is no {path[:400]!r}")
        return stored


def _archive(parts: list[archives.Part], key: str, request: Request) -> Response:
    """An archive, or the one range of it that is asked for by its first byte."""
    size = archives.size(parts)
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{key}"'}
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    if asked is None or request.headers.get("if-range", headers["ETag"]) != headers["ETag"]:
        headers["Content-Length"] = str(size)
        return StreamingResponse(archives.read(parts, 0, size), headers=headers, media_type=_BYTES)
    start, end = int(asked[1]), min(size, int(asked[2] or size) + 1)
    if start >= end:
        raise HTTPException(416, "Range: there is no such part", {"Content-Range": f"bytes */{size}"})
    headers |= {"Content-Range": f"bytes {start}-{end - 1}/{size}", "Content-Length": str(end - start)}
    return StreamingResponse(archives.read(parts, start, end), 206, headers, _BYTES)


def _gone() -> HTTPException:
    return HTTPException(404, "file: it is not there any more; its checkpoint was removed")
