"""The session pod over HTTP: the tinker SDK's own paths below /api/v1, /status for the operator, health probes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from everloop_trainer.adjusted import automatic
from everloop_trainer.config import Settings
from everloop_trainer.server import fragments, listings, schemas, submissions
from everloop_trainer.server.bodies import read_json_object, read_protobuf
from everloop_trainer.server.checkpoints import WEIGHTS_HEADER, CheckpointRoutes
from everloop_trainer.server.files import FileRoutes
from everloop_trainer.server.gate import Closed, Gate, Guard
from everloop_trainer.session import identifiers
from everloop_trainer.session.completions import Completion
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded, Unknown
from everloop_trainer.session.service import Run
from everloop_trainer.tinker_proto import tinker_public

POLL_SECONDS = 30.0
"""How long retrieve_future waits; the SDK gives up on its side after 45 s."""

_Asked = TypeVar("_Asked", bound=BaseModel)

_FORWARD_BACKWARD = fragments.layout(tinker_public.ForwardBackwardRequest.DESCRIPTOR)
STAND_INS_HEADER = "x-everloop-stand-ins"
"""`true`: the platform wants losses that are not published replaced by what stands in for them."""
KEY_HEADER = "x-everloop-key"
"""Id of the API key that a call came with."""
_KEY_ID = re.compile(r"[a-z0-9-]{1,63}")


def build_app(gate: Gate) -> Starlette:
    """The application behind `gate`."""
    pod = _Routes(gate)
    submits = {
        "create_model": pod.create_model,
        "forward_backward": pod.forward_backward,
        "optim_step": pod.optim_step,
        "load_weights": pod.load_weights,
        "save_weights": pod.save_weights,
        "save_weights_for_sampler": pod.save_weights_for_sampler,
        "save_weights_external": pod.save_weights_external,
        "asample": pod.sample,
        "retrieve_future": pod.retrieve_future,
        "retrieve_futures": pod.retrieve_futures,
        "cancel_future": pod.cancel_future,
        "get_info": pod.get_info,
        "weights_info": pod.weights_info,
    }
    return Starlette(
        routes=[
            Route("/healthz", pod.healthz),
            Route("/readyz", pod.readyz),
            Route("/status", pod.status),
            Route("/snapshot", pod.snapshot, methods=["POST"]),
            Route("/settings", pod.settings, methods=["PUT"]),
            Route("/api/v1/training_runs", pod.training_runs),
            Route("/api/v1/training_runs/{run}", pod.training_run),
            Route("/api/v1/training_runs/{run}/checkpoints", pod.run_checkpoints),
            Route("/api/v1/checkpoints", pod.checkpoints),
            Route("/api/v1/sessions", pod.client_sessions),
            *CheckpointRoutes(gate).routes(),
            *FileRoutes(gate).routes(),
            *(Route(f"/api/v1/{name}", endpoint, methods=["POST"]) for name, endpoint in submits.items()),
        ],
        middleware=[Middleware(Guard, gate=gate)],
        exception_handlers={
            HTTPException: _http_error,
            submissions.Undecodable: _undecodable,
            Closed: lambda _request, _error: gate.closed_response(),
        },
    )


class _Routes:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def healthz(self, _request: Request) -> Response:
        return PlainTextResponse("ok")

    async def readyz(self, _request: Request) -> Response:
        return PlainTextResponse("ok") if self._gate.ready else PlainTextResponse("not ready", 503)

    async def status(self, _request: Request) -> Response:
        return JSONResponse(self._gate.status())

    async def snapshot(self, request: Request) -> Response:
        name = (await read_json_object(request)).get("id")
        if not isinstance(name, str) or not 0 < len(name) <= 253:
            raise HTTPException(400, "id: must be a string of 1 to 253 characters")
        self._gate.service.request_snapshots(name)
        return Response(status_code=202)

    async def settings(self, request: Request) -> Response:
        asked = _fields(Settings, await read_json_object(request))
        try:
            self._gate.service.take_checkpoints(automatic(asked.checkpoints))
        except OSError as error:
            raise HTTPException(503, f"the pod can't keep it: {error.strerror}") from None
        return Response(status_code=204)

    async def create_model(self, request: Request) -> Response:
        return await self._submit(request, submissions.create_model(await read_json_object(request)))

    async def forward_backward(self, request: Request) -> Response:
        body = await read_protobuf(request)
        if fragments.is_fragmented(body, _FORWARD_BACKWARD):
            raise HTTPException(400, f"body: more than {fragments.MOST_FIELDS} fields; send it in several requests")
        try:
            message = tinker_public.ForwardBackwardRequest.FromString(body)
        except DecodeError as error:
            raise HTTPException(400, f"body: not a ForwardBackwardRequest: {error}") from None
        return await self._submit(request, submissions.forward_backward(message, body, stand_ins=_stand_ins(request)))

    async def optim_step(self, request: Request) -> Response:
        return await self._submit(request, submissions.optim_step(await read_json_object(request)))

    async def load_weights(self, request: Request) -> Response:
        allowed = request.headers.get(WEIGHTS_HEADER)
        return await self._submit(request, submissions.load_weights(await read_json_object(request), allowed))

    async def save_weights(self, request: Request) -> Response:
        return await self._submit(request, submissions.save_weights(await read_json_object(request)))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        return await self._submit(request, submissions.save_weights_for_sampler(await read_json_object(request)))

    async def save_weights_external(self, request: Request) -> Response:
        return await self._submit(request, submissions.save_weights_external(await read_json_object(request)))

    async def sample(self, request: Request) -> Response:
        weights = request.headers.get(WEIGHTS_HEADER)
        operation = submissions.sample(await read_json_object(request), weights, stand_ins=_stand_ins(request))
        return await self._submit(request, operation, sample_sequence_ids=submissions.sample_sequence_ids(operation))

    async def _submit(self, request: Request, operation: Operation, **promised: Any) -> Response:
        """Answers with the SDK's UntypedAPIFuture once the operation is durable."""
        self._hear(request, operation.stream)
        await self._gate.call(self._gate.service.accept(operation))
        return JSONResponse({"request_id": operation.request_id, **promised})

    def _hear(self, request: Request, stream: str) -> None:
        key = request.headers.get(KEY_HEADER, "")
        if _KEY_ID.fullmatch(key):
            self._gate.service.hear(stream, key)

    async def retrieve_future(self, request: Request) -> Response:
        # The SDK takes a full answer although `allow_metadata_only` is set: it is a permission, not a demand.
        asked = _fields(schemas.FutureRetrieveRequest, await read_json_object(request))
        self._hear(request, asked.request_id)
        outcome = await self._gate.poll(self._gate.service.outcome(asked.request_id, POLL_SECONDS))
        match outcome:
            case Succeeded(content_type=content_type, body=body):
                return Response(body, media_type=content_type)
            case Failed(error=error, category=category):
                return JSONResponse({"error": error, "category": category})
            case Pending(queue_state=state, reason=reason):
                pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": state}
                return JSONResponse(pending | {"queue_state_reason": reason}, 408)
            case Unknown():
                raise _unknown(asked.request_id)

    async def retrieve_futures(self, request: Request) -> Response:
        # `retrieved_request_ids` says nothing new: a result counts as fetched since it was handed out.
        asked = _fields(schemas.FuturesRetrieveRequest, await read_json_object(request))
        self._hear(request, asked.target.sampling_session_id)
        target, seconds = asked.target, POLL_SECONDS if asked.timeout is None else min(asked.timeout, POLL_SECONDS)
        found = await self._gate.poll(
            self._gate.service.completions(
                target.sampling_session_id, target.cloned_sampler_id, asked.prev_cursor, seconds
            )
        )
        if found is None:
            name = target.sampling_session_id[: submissions.LONGEST_PATH]
            raise HTTPException(410, f"target.sampling_session_id: no sample of {name!r} was accepted here")
        return JSONResponse({"completions": [_completion(each) for each in found[0]], "cursor": found[1]})

    async def cancel_future(self, request: Request) -> Response:
        asked = _fields(schemas.FutureCancelRequest, await read_json_object(request))
        parts = identifiers.split_request_id(asked.request_id)
        if parts is not None and identifiers.is_model(parts[0]):
            raise HTTPException(400, "request_id: only samples can be cancelled, not an operation of a model")
        if not await self._gate.call(self._gate.service.cancel(asked.request_id)):
            raise _unknown(asked.request_id)
        return JSONResponse({})

    async def training_runs(self, _request: Request) -> Response:
        return JSONResponse({"training_runs": [listings.run_body(run) for run in await self._runs()]})

    async def training_run(self, request: Request) -> Response:
        return JSONResponse(listings.run_body(await self._run(request.path_params["run"])))

    async def run_checkpoints(self, request: Request) -> Response:
        return JSONResponse(listings.checkpoints_body([await self._run(request.path_params["run"])]))

    async def checkpoints(self, _request: Request) -> Response:
        return JSONResponse(listings.checkpoints_body(await self._runs()))

    async def client_sessions(self, _request: Request) -> Response:
        sessions = self._gate.service.client_sessions()
        await self._gate.call(self._gate.service.still_ours())
        return JSONResponse({"sessions": [dataclasses.asdict(session) for session in sessions]})

    async def weights_info(self, request: Request) -> Response:
        path = _fields(schemas.WeightsInfoRequest, await read_json_object(request)).tinker_path
        for run in await self._runs():
            if any(checkpoint.path == path for checkpoint in run.checkpoints):
                return JSONResponse(listings.weights_body(run))
        raise HTTPException(404, f"tinker_path: there is no checkpoint {path[: submissions.LONGEST_PATH]!r}")

    async def _runs(self) -> list[Run]:
        """What a superseded server knows is told to nobody: that it lacks something would pass for the truth."""
        service = self._gate.service
        runs = service.runs()
        await self._gate.call(service.still_ours())
        return runs

    async def _run(self, model_id: str) -> Run:
        for run in await self._runs():
            if run.info.model_id == model_id:
                return run
        raise HTTPException(404, f"training_run_id: {model_id!r} is no model of this session")

    async def get_info(self, request: Request) -> Response:
        asked = _fields(schemas.GetInfoRequest, await read_json_object(request))
        service = self._gate.service
        model = service.model(asked.model_id)
        await self._gate.call(service.still_ours())
        if model is None:
            name = asked.model_id[: submissions.LONGEST_PATH]
            raise HTTPException(404, f"model_id: {name!r} is no model of this session")
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_data": {"model_name": model.base_model},
                "model_name": model.base_model,
                "is_lora": True,
                "lora_rank": model.lora.rank,
            }
        )


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(410, f"request_id: {request_id[: submissions.LONGEST_PATH]!r} was never accepted here")


def _stand_ins(request: Request) -> bool:
    return request.headers.get(STAND_INS_HEADER) == "true"


def _completion(completion: Completion) -> dict[str, Any]:
    if not completion.ok:
        return {"state": "failed", "request_id": completion.request_id}
    size = {} if completion.size is None else {"response_payload_uncompressed_size": completion.size}
    return {"state": "finished", "request_id": completion.request_id, **size}


def _fields(model: type[_Asked], body: dict[str, Any]) -> _Asked:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise submissions.Undecodable(submissions.first_problem(error)) from None


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _undecodable(_request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 400)
