"""The files of external weights, for the gateway, which lets only those have them who may.

They never change: a file is asked for by the key of its checkpoint as well, so that what was begun is never continued
with the bytes of another one that has got the same name since.
"""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from everloop_trainer import peftfiles
from everloop_trainer.server.gate import Gate
from everloop_trainer.session.identifiers import tinker_path
from everloop_trainer.session.keeping import NoCheckpoint

KIND = "external_weights"


class FileRoutes:
    """Their names, and each of them as it is or in part."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def routes(self) -> list[Route]:
        """All of them."""
        files = f"/api/v1/training_runs/{{run}}/checkpoints/{KIND}/{{name}}/files"
        return [Route(files, self.names), Route(f"{files}/{{key}}/{{file}}", self.content)]

    async def names(self, request: Request) -> Response:
        """What there is, and the key to ask for it by."""
        directory = await self._directory(request)
        return JSONResponse({"key": directory.name, "files": await _present(directory)})

    async def content(self, request: Request) -> Response:
        """One file; of a range of its bytes, if the request names one."""
        directory, parts = await self._directory(request), request.path_params
        if parts["key"] != directory.name or parts["file"] not in await _present(directory):
            raise HTTPException(404, "file: it is not there any more; its checkpoint was removed")
        return FileResponse(directory / parts["file"], media_type="application/octet-stream")

    async def _directory(self, request: Request) -> Path:
        parts, service = request.path_params, self._gate.service
        path = tinker_path(parts["run"], KIND, parts["name"])
        try:
            directory = service.keeping.directory(path)
        except NoCheckpoint:
            directory = None
        await self._gate.call(service.still_ours())
        if directory is None:
            raise HTTPException(404, f"checkpoint: there is no {path[:400]!r}")
        return directory


async def _present(directory: Path) -> list[str]:
    """None if it is deleted this moment. In threads that hang with the storage at nobody's expense."""
    try:
        return await run_in_threadpool(peftfiles.present, directory)
    except FileNotFoundError:
        return []
