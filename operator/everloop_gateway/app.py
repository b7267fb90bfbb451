"""The gateway's HTTP side: authentication, the routes of the Tinker wire, and what is answered on the spot."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from everloop_gateway import client_sessions, wire
from everloop_gateway.calls import Calls, Incoming
from everloop_gateway.checkpoints import IDEMPOTENCY_HEADER, Change, Checkpoints
from everloop_gateway.cluster import Cluster
from everloop_gateway.downloads import EXTERNAL, ROUTE, Asked, Downloads, base_url
from everloop_gateway.file_stream import FileStream
from everloop_gateway.held import HeldResponse, error_answer, json_answer
from everloop_gateway.holding import MAX_PAUSE_SECONDS, Kind
from everloop_gateway.ids import shorten
from everloop_gateway.keys import Principal, Unauthorized
from everloop_gateway.kube import ApiRefused, ApiUnavailable, pause
from everloop_gateway.listings import Listings, Page, accessible, page
from everloop_gateway.projects import refuse_other_projects
from everloop_gateway.queries import once
from everloop_gateway.refusal import Refusal
from everloop_gateway.unseen_keys import TooManyQuestions
from everloop_gateway.upstream import Answer, Progress
from everloop_gateway.wire import PREFIX
from everloop_operator.api import tokens

MAX_BODY_BYTES = 4 << 20
"""Of a call that is read here: what is parsed may take thirty times the memory of its text."""
MAX_SAMPLE_BYTES = 16 << 20
MAX_PROTOBUF_BYTES = 64 << 20
"""As the session pod has it; of these, two fields are read."""
# Before the first lists are in nobody's key is known; refusing it then would end a client for good.
SYNC_SECONDS = 30.0

FOREIGN_ACCESS_HEADER = "X-Tinker-Weights-Access-Token"

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    # A chunk is the unit that is run again after a loss, and by which models take turns: keep it small.
    "fwdbwd_max_chunk_len": 128,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "billing_exception_max_pause_duration_sec": MAX_PAUSE_SECONDS,
    # Of one sampling client; each holds a poll as long as it is under way.
    "sample_max_concurrent_requests": 8192,
    "sample_no_retries": False,
    # An outage may last longer than the two hours after which the client would call a sample stuck.
    "sample_enable_stuck_detection": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": True,
}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

Work = Callable[[Incoming, Progress], Awaitable[Answer]]
Endpoint = Callable[[Request], Awaitable[HeldResponse]]
Listing = Callable[[Page, Progress], Awaitable[Answer]]
Question = Callable[[Principal, str, Progress], Awaitable[Answer]]


class App:
    """Handlers of all routes. Every one but the health probes and signed URLs wants an API key."""

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        listings: Listings,
        checkpoints: Checkpoints,
        downloads: Downloads,
        draining: asyncio.Event,
        *,
        batched_polls: bool,
    ) -> None:
        self._config = {**CLIENT_CONFIG, "sample_use_retrieve_futures": batched_polls}
        self._cluster = cluster
        self._calls = calls
        self._listings = listings
        self._checkpoints = checkpoints
        self._downloads = downloads
        self._draining = draining

    def routes(self) -> list[Route]:
        """All routes."""
        calls = self._calls
        large = {"asample": MAX_SAMPLE_BYTES, "forward_backward": MAX_PROTOBUF_BYTES}
        held = {
            "create_model": (Kind.CREATE, calls.create_model, wire.JSON),
            "create_custom_loss": (Kind.QUERY, calls.create_custom_loss, wire.JSON),
            "create_sampling_session": (Kind.CREATE, calls.create_sampling_session, wire.JSON),
            "get_info": (Kind.QUERY, calls.get_info, wire.JSON),
            "weights_info": (Kind.QUERY, calls.weights_info, wire.JSON),
            "forward_backward": (Kind.TRAIN, calls.forward_backward, wire.PROTOBUF),
            "optim_step": (Kind.TRAIN, calls.train, wire.JSON),
            "load_weights": (Kind.TRAIN, calls.load, wire.JSON),
            "save_weights": (Kind.SAVE, calls.save, wire.JSON),
            "save_weights_for_sampler": (Kind.SAVE, calls.save, wire.JSON),
            "save_weights_external": (Kind.SAVE, calls.save, wire.JSON),
            "asample": (Kind.SAMPLE, calls.sample, wire.JSON),
            "retrieve_future": (Kind.POLL, calls.retrieve_future, wire.JSON),
            "retrieve_futures": (Kind.POLL_ALL, calls.retrieve_futures, wire.JSON),
            "cancel_future": (Kind.QUERY, calls.cancel_future, wire.JSON),
        }
        return [
            Route("/healthz", self.health),
            Route("/readyz", self.readiness),
            Route(f"{PREFIX}/healthz", self.health),
            Route(f"{PREFIX}/client/config", self.client_config, methods=["POST"]),
            Route(f"{PREFIX}/client/dynamic_config", self.dynamic_config, methods=["POST"]),
            Route(f"{PREFIX}/telemetry", self.telemetry, methods=["POST"]),
            Route(f"{PREFIX}/get_server_capabilities", self.capabilities),
            Route(f"{PREFIX}/create_session", self.create_session, methods=["POST"]),
            Route(f"{PREFIX}/session_heartbeat", self.heartbeat, methods=["POST"]),
            Route(f"{PREFIX}/sessions", self._page(self._sessions)),
            Route(f"{PREFIX}/sessions/search", self.search_sessions, methods=["POST"]),
            Route(f"{PREFIX}/sessions/{{session_id}}", self.client_session),
            Route(f"{PREFIX}/sessions/{{session_id}}/finish", self.finish, methods=["POST"]),
            Route(f"{PREFIX}/samplers/{{sampler_id}}", self.sampler),
            Route(f"{PREFIX}/training_runs", self._page(self._listings.runs)),
            Route(f"{PREFIX}/training_runs/{{run_id}}", self.training_run),
            Route(f"{PREFIX}/training_runs/{{run_id}}/checkpoints", self._of_run(self._listings.run_checkpoints)),
            Route(f"{PREFIX}/checkpoints", self._page(self._listings.checkpoints)),
            self._urls(f"{EXTERNAL}/{{name}}/external_weights_urls", archive=False),
            self._urls("{kind}/{name}/archive", archive=True),
            Route(ROUTE, self.download),
            self._change("DELETE", ""),
            self._change("PUT", "/ttl"),
            self._change("POST", "/publish"),
            self._change("DELETE", "/publish"),
            *(self._held(f"{PREFIX}/{name}", *how, large.get(name, MAX_BODY_BYTES)) for name, how in held.items()),
            Route(f"{PREFIX}/copy_weights", self.copy_weights, methods=["POST"]),
            Route(f"{PREFIX}/{{rest:path}}", self.not_served, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return JSONResponse({"status": "ok"})

    async def readiness(self, request: Request) -> Response:
        """Everything was read, and this replica is to stay."""
        if self._cluster.ready.is_set() and not self._draining.is_set():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "not ready"}, 503)

    async def client_config(self, request: Request) -> Response:
        """Flags that steer the SDK."""
        await self._principal(request)
        return JSONResponse(self._config)

    async def dynamic_config(self, request: Request) -> Response:
        """Flags that the SDK reads again from time to time."""
        await self._principal(request)
        return JSONResponse(DYNAMIC_CONFIG)

    async def telemetry(self, request: Request) -> Response:
        """Accepted and dropped."""
        await self._principal(request)
        await _read_body(request)
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, request: Request) -> Response:
        """The base models that the key's namespace serves, or would serve once one is asked for."""
        principal = await self._principal(request)
        lengths: dict[str, int | None] = {
            entry.name: None for entry in self._cluster.catalogue.entries if entry.creatable_in(principal.namespace)
        }
        for session in self._cluster.sessions.in_namespace(principal.namespace):
            if not session.deleting and not session.stopped:
                lengths[session.base_model] = session.max_sequence_length
        models = [
            {"model_name": name, "max_context_length": lengths[name], "trainable": True, "sampleable": True}
            for name in sorted(lengths)
        ]
        return JSONResponse({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        """A client session is its id: derived, so that any replica gives the same one to a repeat."""
        principal = await self._principal(request)
        try:
            asked = wire.json_object(await _read_body(request))
            wire.check_type(asked, "create_session")
        except wire.UndecodableBody as error:
            raise HTTPException(400, str(error)) from None
        _check_project(asked.get("project_id"), principal, "project_id")
        unkept = client_sessions.unkept(asked)
        repeat = request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)
        session_id = tokens.session_id(self._cluster.master(), principal.namespace, principal.key_id, repeat)
        told = {"warning_message": unkept} if unkept else {}
        return JSONResponse({"type": "create_session", "session_id": session_id, **told})

    async def heartbeat(self, request: Request) -> Response:
        """The client lives."""
        principal = await self._principal(request)
        try:
            asked = wire.json_object(await _read_body(request))
            wire.check_type(asked, "session_heartbeat")
            session_id = wire.text_field(asked, "session_id")
        except wire.UndecodableBody as error:
            raise HTTPException(400, str(error)) from None
        self._check_session(principal, session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """The client is done."""
        principal = await self._principal(request)
        self._check_session(principal, request.path_params["session_id"])
        await _read_body(request)
        return JSONResponse({})

    async def client_session(self, request: Request) -> HeldResponse:
        """What a client's session has made; that of another key is as good as none."""
        principal, session_id = await self._principal(request), request.path_params["session_id"]
        self._check_session(principal, session_id)

        async def work(progress: Progress) -> Answer:
            accessible(_query(request))  # either tells the same: nobody else's session is ever shown
            found = await self._listings.client_sessions(principal, progress)
            mine = next((each for each in found if each.session_id == session_id), None)
            models, samplers = ((), ()) if mine is None else (mine.models, mine.samplers)
            return json_answer({"training_run_ids": list(models), "sampler_ids": list(samplers)})

        return HeldResponse(Kind.QUERY, _refusing(work), self._draining)

    async def search_sessions(self, request: Request) -> HeldResponse:
        """The key's sessions, page by page."""
        principal, body = await self._principal(request), await _read_body(request)
        try:
            asked = wire.json_object(body)
        except wire.UndecodableBody as error:
            raise HTTPException(400, str(error)) from None

        async def work(progress: Progress) -> Answer:
            found = await self._listings.client_sessions(principal, progress)
            return json_answer(client_sessions.search(found, asked, principal.subject, principal.namespace))

        return HeldResponse(Kind.QUERY, _refusing(work), self._draining)

    async def _sessions(self, asked: Page, progress: Progress) -> Answer:
        found = await self._listings.client_sessions(asked.principal, progress)
        ids = [session.session_id for session in found]
        return json_answer({"sessions": ids[asked.offset : asked.offset + asked.limit]})

    async def sampler(self, request: Request) -> HeldResponse:
        """What a sampling session samples from."""
        principal = await self._principal(request)
        sampler_id = request.path_params["sampler_id"]
        return HeldResponse(
            Kind.QUERY,
            _refusing(lambda progress: self._calls.sampler_info(principal, sampler_id, progress)),
            self._draining,
        )

    async def training_run(self, request: Request) -> HeldResponse:
        """One model, of the key's own or of those that others let it read."""
        principal, run_id = await self._principal(request), request.path_params["run_id"]

        async def work(progress: Progress) -> Answer:
            return await self._listings.run(principal, run_id, accessible(_query(request)), progress)

        return HeldResponse(Kind.QUERY, _refusing(work), self._draining)

    async def download(self, request: Request) -> FileStream:
        """A file, for whoever has its URL: the one call that wants no API key."""
        await self._known()
        try:
            query = _query(request)
            file = self._downloads.verified(request.path_params, query)
        except Refusal as refusal:
            raise HTTPException(refusal.status, refusal.detail) from None
        return self._downloads.stream(file, query, request.headers)

    async def copy_weights(self, request: Request) -> HeldResponse:
        """A checkpoint that the key may read becomes one of its own."""
        principal = await self._principal(request)
        if request.headers.get(FOREIGN_ACCESS_HEADER) is not None:
            raise HTTPException(400, f"{FOREIGN_ACCESS_HEADER}: not served by this version")
        body = await _read_body(request)
        content_type = _content_type(request, wire.JSON)
        incoming = Incoming(principal, f"{PREFIX}/copy_weights", body, content_type, wire.JSON)
        repeat = request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)
        return HeldResponse(
            Kind.QUERY,
            _refusing(lambda progress: self._calls.copy_weights(incoming, repeat, progress)),
            self._draining,
        )

    async def not_served(self, request: Request) -> Response:
        """Parts of the wire that are not there."""
        await self._principal(request)
        raise HTTPException(404, f"{request.method} {shorten(request.url.path)} is not served by this version")

    def _page(self, listing: Listing) -> Endpoint:
        async def endpoint(request: Request) -> HeldResponse:
            principal = await self._principal(request)

            async def work(progress: Progress) -> Answer:
                return await listing(page(principal, _query(request)), progress)

            return HeldResponse(Kind.QUERY, _refusing(work), self._draining)

        return endpoint

    def _of_run(self, question: Question) -> Endpoint:
        async def endpoint(request: Request) -> HeldResponse:
            principal, run_id = await self._principal(request), request.path_params["run_id"]
            return HeldResponse(
                Kind.QUERY, _refusing(lambda progress: question(principal, run_id, progress)), self._draining
            )

        return endpoint

    def _change(self, method: str, below: str) -> Route:
        async def endpoint(request: Request) -> HeldResponse:
            principal, parts = await self._principal(request), request.path_params
            change = Change(
                method=method,
                below=below,
                run_id=parts["run_id"],
                kind=parts["kind"],
                name=parts["name"],
                body=await _read_body(request),
                repeat=request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16),
            )
            return HeldResponse(
                Kind.QUERY,
                _refusing(lambda progress: self._checkpoints.change(principal, change, progress)),
                self._draining,
            )

        path = f"{PREFIX}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}{below}"
        return Route(path, endpoint, methods=[method])

    def _urls(self, below: str, *, archive: bool) -> Route:
        """Where files can be fetched from, for a while and without a key."""

        async def endpoint(request: Request) -> HeldResponse:
            principal, parts = await self._principal(request), request.path_params

            async def work(progress: Progress) -> Answer:
                base = base_url(request.url.scheme, request.headers)
                kind = parts.get("kind", EXTERNAL)
                asked = Asked(principal, parts["run_id"], kind, parts["name"], archive, base)
                return await self._downloads.urls(asked, progress)

            return HeldResponse(Kind.QUERY, _refusing(work), self._draining)

        return Route(f"{PREFIX}/training_runs/{{run_id}}/checkpoints/{below}", endpoint)

    def _held(self, path: str, kind: Kind, work: Work, content_type: str, limit: int) -> Route:
        async def endpoint(request: Request) -> HeldResponse:
            principal = await self._principal(request)
            incoming = Incoming(
                principal=principal,
                path=path,  # of the route: what a client wrote is never asked of a pod
                body=await _read_body(request, limit),
                content_type=_content_type(request, content_type),
                accept=wire.PROTOBUF if wire.PROTOBUF in request.headers.get("accept", "") else wire.JSON,
            )
            return HeldResponse(kind, _refusing(lambda progress: work(incoming, progress)), self._draining)

        return Route(path, endpoint, methods=["POST"])

    async def _known(self) -> None:
        if not await pause(self._cluster.ready, SYNC_SECONDS):
            raise HTTPException(503, "the gateway has not read its API keys yet", {"Retry-After": "1"})

    async def _principal(self, request: Request) -> Principal:
        await self._known()
        try:
            return await self._cluster.authenticate(request.headers.get("x-api-key", ""))
        except Unauthorized as error:
            raise HTTPException(401, str(error)) from None
        except (TooManyQuestions, ApiUnavailable, ApiRefused):
            raise HTTPException(503, "X-API-Key: unknown, and can't be looked up now", {"Retry-After": "1"}) from None

    def _check_session(self, principal: Principal, session_id: str) -> None:
        if not self._cluster.owns(principal, session_id):
            raise HTTPException(403, f"session_id {shorten(session_id)!r} was not created with this API key")


def _check_project(project: object, principal: Principal, field: str) -> None:
    try:
        refuse_other_projects(project, principal.namespace, field)
    except Refusal as refusal:
        raise HTTPException(refusal.status, refusal.detail) from None


def build(app: App) -> Starlette:
    """The ASGI application."""
    return Starlette(routes=app.routes(), exception_handlers={HTTPException: _error})


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def _refusing(work: Callable[[Progress], Awaitable[Answer]]) -> Callable[[Progress], Awaitable[Answer]]:
    async def answer(progress: Progress) -> Answer:
        try:
            return await work(progress)
        except Refusal as refusal:
            return error_answer(refusal.status, refusal.detail)
        except ApiRefused as refusal:
            if refusal.status == 404:
                return error_answer(404, "the namespace of this API key does not exist")
            raise

    return answer


def _query(request: Request) -> dict[str, str]:
    """The parameters of the request's address. Raises Refusal."""
    return once(request.query_params.multi_items())


def _content_type(request: Request, expected: str) -> str:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"content-encoding: {shorten(encoding)!r} is not accepted, send the body as it is")
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != expected:
        raise HTTPException(415, f"content-type: {shorten(given)!r} is not accepted here, expected {expected}")
    return given


async def _read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"body: more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
