"""What a client does to its checkpoints: remove, publish and copy them, and say when they expire.

None of these calls has a number; what makes a repeat one is its idempotency key, which the SDK keeps through its own
retries and the gateway through its own. Of a copy it is the name of the training run that is to hold it.
"""

from __future__ import annotations

import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from everloop_trainer.server import submissions
from everloop_trainer.server.bodies import read_json_object
from everloop_trainer.server.gate import Gate
from everloop_trainer.session.identifiers import tinker_path
from everloop_trainer.session.keeping import InUse, NoCheckpoint, Taken
from everloop_trainer.session.times import refuse_ttl

IDEMPOTENCY_HEADER = "x-idempotency-key"
WEIGHTS_HEADER = "x-everloop-weights"
"""Tinker path of what a call may read, or what is sampled from."""
LONGEST_KEY = 200
"""Characters of an idempotency key."""


class CheckpointRoutes:
    """The calls that change a stored checkpoint. An answer without content has an empty object as its body."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def routes(self) -> list[Route]:
        """All of them."""
        one = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        return [
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/ttl", self.expire, methods=["PUT"]),
            Route(f"{one}/publish", self.publish, methods=["POST", "DELETE"]),
            Route("/api/v1/copy_weights", self.copy, methods=["POST"]),
        ]

    async def delete(self, request: Request) -> Response:
        """Remove it for good."""
        try:
            await self._gate.call(self._gate.service.keeping.remove(_path(request), _key(request)))
        except NoCheckpoint as missing:
            raise _unknown(missing) from None
        except InUse as wanted:
            detail = f"checkpoint: an accepted load_weights is about to read {str(wanted)!r}"
            raise HTTPException(503, detail, {"Retry-After": "1"}) from None
        return JSONResponse({})

    async def expire(self, request: Request) -> Response:
        """Set, move or take away its end."""
        body = await read_json_object(request)
        seconds = body.get("ttl_seconds", "")
        if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool)):
            raise HTTPException(400, "ttl_seconds: an integer, or null to keep it for ever, is required")
        error = refuse_ttl(seconds)
        if error is not None:
            raise HTTPException(400, error)
        try:
            keeping = self._gate.service.keeping
            await self._gate.call(keeping.expire_after(_path(request), seconds, _key(request)))
        except NoCheckpoint as missing:
            raise _unknown(missing) from None
        return JSONResponse({})

    async def publish(self, request: Request) -> Response:
        """Let others read it, or not any more. What is so already is no conflict: the SDK would repeat for minutes."""
        try:
            keeping, public = self._gate.service.keeping, request.method == "POST"
            await self._gate.call(keeping.publish(_path(request), public, _key(request)))
        except NoCheckpoint as missing:
            raise _unknown(missing) from None
        return JSONResponse({})

    async def copy(self, request: Request) -> Response:
        """Make a training run that holds a copy. A repeat is answered even if its source may be read no more."""
        asked, run = submissions.copy_weights(await read_json_object(request))
        service = self._gate.service
        keeping = service.keeping
        allowed = request.headers.get(WEIGHTS_HEADER) == asked.source_path
        if not allowed and keeping.copied(run) is None:
            await self._gate.call(service.still_ours())
            path = asked.source_path[: submissions.LONGEST_PATH]
            # Not 403, by which the gateway would take its own token to be refused.
            raise HTTPException(404, f"source_path: {path!r} is no checkpoint that this API key may copy")
        try:
            path = await self._gate.call(keeping.copy(asked.source_path, run, asked.ttl_seconds))
        except NoCheckpoint as missing:
            raise HTTPException(404, f"source_path: there is no {str(missing)[:400]!r}") from None
        except Taken as taken:
            raise HTTPException(400, f"model_seq_id: {str(taken)[:400]!r} is a model already") from None
        return JSONResponse({"tinker_path": path})


def _path(request: Request) -> str:
    parts = request.path_params
    return tinker_path(parts["run"], parts["kind"], parts["name"])


def _key(request: Request) -> str:
    key = request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)
    if len(key) > LONGEST_KEY:
        raise HTTPException(400, f"{IDEMPOTENCY_HEADER}: at most {LONGEST_KEY} characters")
    return key


def _unknown(missing: NoCheckpoint) -> HTTPException:
    return HTTPException(404, f"checkpoint: there is no {str(missing)[:400]!r}")
