"""The calls that go to a session pod, or that need a binding: what is read of each, and what is done for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from everloop_gateway import wire
from everloop_gateway.catalogue import canonical_name
from everloop_gateway.cluster import Cluster
from everloop_gateway.creation import Creation
from everloop_gateway.held import error_answer, json_answer
from everloop_gateway.holders import Holders, may_have_runs
from everloop_gateway.holding import Kind
from everloop_gateway.ids import MalformedId, Stream, parse_request_id, parse_stream, parse_tinker_path, shorten
from everloop_gateway.intents import Intent, Intents
from everloop_gateway.keys import Principal
from everloop_gateway.projects import refuse_other_projects
from everloop_gateway.published import published
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Binding, Gone, Stopped, housed
from everloop_gateway.stopped import GONE, stopped_answer
from everloop_gateway.upstream import Answer, Call, Progress, Upstream, until_available
from everloop_losses.graph import GraphError
from everloop_losses.identity import MAX_JSON_BYTES, loss_id, session_of, unpack
from everloop_operator.api import tokens

WEIGHTS_HEADER = "X-Everloop-Weights"
BASE_WEIGHTS = "base"
STAND_INS_HEADER = "X-Everloop-Stand-Ins"
# The id of the caller's key: in a session pod keys take turns, and what is computed is counted by them.
KEY_HEADER = "X-Everloop-Key"

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Incoming:
    """One call of a client."""

    principal: Principal
    path: str
    body: bytes
    content_type: str
    accept: str


class Calls:
    """Does the calls. Each method returns a complete answer, however long that takes, or raises Refusal."""

    def __init__(self, cluster: Cluster, upstream: Upstream, intents: Intents, *, stand_ins: bool) -> None:
        self._stand_ins = {STAND_INS_HEADER: "true"} if stand_ins else {}
        self._cluster = cluster
        self._upstream = upstream
        self._intents = intents
        self._creation = Creation(cluster)
        self._holders = Holders(cluster, upstream)

    async def create_model(self, incoming: Incoming, progress: Progress) -> Answer:
        """Bind a new model to a TrainingSession of the key's namespace, then create it there."""
        body = _json(incoming.body)
        stream = self._new_stream(incoming.principal, body, "train", "model_seq_id")
        base_model = _read(wire.text_field, body, "base_model")
        binding = await self._bind(incoming.principal, stream, base_model, None, progress)
        sent = incoming.body
        if base_model != binding.base_model:
            sent = _for_base_model(body, binding.base_model)
        return await self._deliver(replace(incoming, body=sent), binding, Kind.CREATE, progress)

    async def train(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward an operation of a model whose JSON body names it."""
        body = _json(incoming.body)
        binding = await self._model(incoming.principal, _read(wire.text_field, body, "model_id"), progress)
        return await self._deliver(incoming, binding, Kind.TRAIN, progress)

    async def forward_backward(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a protobuf forward_backward."""
        try:
            model_id = wire.protobuf_model_id(incoming.body)
        except wire.UndecodableBody as error:
            raise Refusal(400, str(error)) from None
        binding = await self._model(incoming.principal, model_id, progress)
        return await self._deliver(incoming, binding, Kind.TRAIN, progress, self._stand_ins)

    async def save(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a save, or keep it while there is no pod; one that makes a sampling session binds that first."""
        body = _json(incoming.body)
        binding = await self._model(incoming.principal, _read(wire.text_field, body, "model_id"), progress)
        # Whatever is kept is taken by its pod: nobody could be told any more that it is not.
        request_id = f"{binding.id}:{_read(wire.seq_id, body)}"
        if body.get("sampling_session_seq_id") is not None:
            session_id = parse_stream(binding.id, "model_id").session_id
            number = _read(wire.number_of_session, body, "sampling_session_seq_id")
            sampler = Stream(session_id, "sample", number)
            await self._ensure(sampler, binding.derive(sampler.id, incoming.principal, None), progress)
        intent = Intent(request_id, binding.namespace, incoming.path, incoming.body)
        return await self._intents.answer(intent, self._deliver(incoming, binding, Kind.SAVE, progress), progress)

    async def load(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a load, naming the path if the key may read it; a load that creates a model binds that first.

        The new model belongs where its checkpoint is. An operation of an existing model is never refused here: one
        whose path the key may not read ends as a failed operation.
        """
        body = _json(incoming.body)
        path = _read(wire.text_field, body, "path")
        if body.get("model_id") is not None:
            binding = await self._model(incoming.principal, _read(wire.text_field, body, "model_id"), progress)
            headers = {WEIGHTS_HEADER: path} if await self._may_read(incoming.principal, path, progress) else {}
        else:
            stream = self._new_stream(incoming.principal, body, "train", "model_seq_id")
            source = await self.source(incoming.principal, path, "path", progress)
            headers = {WEIGHTS_HEADER: path}
            binding = await self._ensure(stream, source.derive(stream.id, incoming.principal, None), progress)
        base_model = _read(wire.optional_text_field, body, "base_model")
        if base_model is not None and canonical_name(base_model, self._cluster.catalogue.entries) == binding.base_model:
            incoming = replace(incoming, body=_for_base_model(body, binding.base_model))
        return await self._deliver(incoming, binding, Kind.TRAIN, progress, headers)

    async def copy_weights(self, incoming: Incoming, repeat: str, progress: Progress) -> Answer:
        """Have a checkpoint copied into a new training run, then bind that to where both are.

        The run follows from key, path and `repeat`, the call's idempotency key, where the client doesn't name it. Who
        repeats a call gets its answer even if the source can't be read any more.
        """
        principal, body = incoming.principal, _json(incoming.body)
        path = _read(wire.text_field, body, "source_path")
        try:
            parse_tinker_path(path, "source_path")
        except MalformedId as error:
            raise Refusal(400, str(error)) from None
        project = _read(wire.optional_text_field, body, "destination_project_id")
        refuse_other_projects(project, principal.namespace, "destination_project_id")
        if body.get("session_id") is not None:
            stream = self._new_stream(principal, body, "train", "model_seq_id")
        elif project is None:
            raise Refusal(400, "destination_project_id: required where there is no session_id")
        else:
            # No header holds a line break: this is the session of no create_session.
            name = f"copy_weights\n{path}\n{repeat}"
            master, key_id = self._cluster.master(), principal.key_id
            stream = Stream(tokens.session_id(master, principal.namespace, key_id, name), "train", 0)
        binding = await self._find(principal, stream, progress)
        bound, headers = binding is not None, {WEIGHTS_HEADER: path}
        if binding is None:
            source = await self.source(principal, path, "source_path", progress)
            binding = source.derive(stream.id, principal, None)
        elif not await self._may_read(principal, path, progress):
            headers = {}
        sent = _with(body, session_id=stream.session_id, model_seq_id=stream.number)
        answer = await self._deliver(replace(incoming, body=sent), binding, Kind.QUERY, progress, headers)
        if answer.status == 200 and not bound:
            await self._ensure(stream, binding, progress)
        return answer

    async def sample(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a sample, with the weights that its sampling session was created for."""
        body = _json(incoming.body)
        text = _read(wire.text_field, body, "sampling_session_id")
        binding = await self._bound(incoming.principal, _sampler(text), "sampling_session_id", progress)
        headers = self._stand_ins if binding.weights is None else {WEIGHTS_HEADER: binding.weights, **self._stand_ins}
        return await self._deliver(incoming, binding, Kind.SAMPLE, progress, headers)

    async def create_custom_loss(self, incoming: Incoming, progress: Progress) -> Answer:
        """Check a traced loss; its id, which holds it, is that of the future, too. Nothing is kept of it."""
        if len(incoming.body) > 2 * MAX_JSON_BYTES:
            raise Refusal(
                400, f"graph: a body of {len(incoming.body)} bytes is too large, {2 * MAX_JSON_BYTES} are taken"
            )
        body = _json(incoming.body)
        _read(wire.check_type, body, "create_custom_loss")
        session_id = _read(wire.text_field, body, "session_id")
        self._check_owner(incoming.principal, session_id, "session_id")
        _read(wire.number_of_session, body, "custom_loss_seq_id")
        try:
            return json_answer({"request_id": loss_id(session_id, body)})
        except GraphError as error:
            raise Refusal(400, str(error)) from None

    def _created_loss(self, principal: Principal, request_id: str, session_id: str) -> Answer:
        self._check_owner(principal, session_id, "request_id")
        try:
            unpack(request_id)
        except GraphError as error:
            raise Refusal(410, f"request_id: {shorten(request_id)!r} is no loss: {error}") from None
        return json_answer({"type": "create_custom_loss", "loss_id": request_id})

    async def retrieve_future(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a long poll; that for a traced loss has its answer in itself."""
        request_id = _read(wire.text_field, _json(incoming.body), "request_id")
        if (session_id := session_of(request_id)) is not None:
            return self._created_loss(incoming.principal, request_id, session_id)
        binding = await self._requested(incoming.principal, request_id, progress)
        answer = await self._deliver(incoming, binding, Kind.POLL, progress)
        if answer.status == GONE:
            # The pod may be faster with this poll than with a call that was kept while it was away.
            await self._intents.settle(request_id, progress)
            answer = await self._deliver(incoming, binding, Kind.POLL, progress)
        return answer

    async def retrieve_futures(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward a long poll for all samples of one client of a sampling session."""
        target = _json(incoming.body).get("target")
        if not isinstance(target, dict):
            raise Refusal(400, "target: an object is required")
        sampler = _sampler(_read(wire.text_field, target, "sampling_session_id"))
        binding = await self._bound(incoming.principal, sampler, "target.sampling_session_id", progress)
        return await self._deliver(incoming, binding, Kind.POLL_ALL, progress)

    async def cancel_future(self, incoming: Incoming, progress: Progress) -> Answer:
        """Have a sample stopped for which nobody waits any more; a repeat does no harm."""
        request_id = _read(wire.text_field, _json(incoming.body), "request_id")
        binding = await self._requested(incoming.principal, request_id, progress)
        return await self._deliver(incoming, binding, Kind.QUERY, progress)

    async def _requested(self, principal: Principal, request_id: str, progress: Progress) -> Binding:
        """Where the stream of an operation of the key's own is."""
        try:
            stream = parse_request_id(request_id)
        except MalformedId as error:
            raise Refusal(410, str(error)) from None
        self._check_owner(principal, stream.session_id, "request_id")
        binding = await self._known(principal, stream, progress)
        if binding is None:
            raise Refusal(410, f"request_id: {request_id!r} is not known; its storage may have been deleted")
        return binding

    async def get_info(self, incoming: Incoming, progress: Progress) -> Answer:
        """Forward get_info, and add the tokenizer that the catalogue names."""
        body = _json(incoming.body)
        binding = await self._model(incoming.principal, _read(wire.text_field, body, "model_id"), progress)
        answer = await self._deliver(incoming, binding, Kind.QUERY, progress)
        tokenizer = self._cluster.catalogue.tokenizer_id(binding.base_model)
        if answer.status != 200 or tokenizer is None:
            return answer
        info = json.loads(answer.body)
        data = info.get("model_data") or {}
        return json_answer({**info, "model_data": {**data, "tokenizer_id": data.get("tokenizer_id") or tokenizer}})

    async def create_sampling_session(self, incoming: Incoming, progress: Progress) -> Answer:
        """Bind a sampling session to weights; needs no session pod."""
        body = _json(incoming.body)
        _read(wire.check_type, body, "create_sampling_session")
        stream = self._new_stream(incoming.principal, body, "sample", "sampling_session_seq_id")
        base_model = _read(wire.optional_text_field, body, "base_model")
        path = _read(wire.optional_text_field, body, "model_path")
        if path is not None:
            model = await self.source(incoming.principal, path, "model_path", progress)
            await self._ensure(stream, model.derive(stream.id, incoming.principal, path), progress)
        elif base_model is not None:
            await self._bind(incoming.principal, stream, base_model, BASE_WEIGHTS, progress)
        else:
            raise Refusal(400, "base_model: required where there is no model_path")
        return json_answer({"type": "create_sampling_session", "sampling_session_id": stream.id})

    async def sampler_info(self, principal: Principal, sampler_id: str, progress: Progress) -> Answer:
        """What a sampling session samples from."""
        binding = await self._bound(principal, _sampler(sampler_id), "sampler_id", progress)
        value = {"sampler_id": binding.id, "base_model": binding.base_model}
        if binding.weights not in (None, BASE_WEIGHTS):
            value["model_path"] = binding.weights
        return json_answer(value)

    async def weights_info(self, incoming: Incoming, progress: Progress) -> Answer:
        """What the model of a checkpoint is."""
        path = _read(wire.text_field, _json(incoming.body), "tinker_path")
        binding = await self.source(incoming.principal, path, "tinker_path", progress)
        return await self._deliver(incoming, binding, Kind.QUERY, progress)

    async def _deliver(
        self,
        incoming: Incoming,
        binding: Binding,
        kind: Kind,
        progress: Progress,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        headers = {KEY_HEADER: incoming.principal.key_id, **(headers or {})}
        call = Call(kind, incoming.path, incoming.body, incoming.content_type, incoming.accept, headers)
        answer = await self._upstream.deliver(binding, call, progress)
        if isinstance(answer, Stopped):
            return _read(stopped_answer, kind, binding.id, incoming.body, incoming.content_type, answer.detail)
        if isinstance(answer, Gone):
            return error_answer(GONE, answer.detail)
        if not kind.polls:
            log.debug("submit", path=incoming.path, stream=binding.id, status=answer.status, key_id=binding.key_id)
        return answer

    async def _bind(
        self, principal: Principal, stream: Stream, base_model: str, weights: str | None, progress: Progress
    ) -> Binding:
        existing = await self._find(principal, stream, progress)
        if existing is not None:
            return existing
        needs_slot = stream.kind == "train"
        session = await self._creation.session_for(principal, base_model, progress, needs_slot=needs_slot)
        return await self._ensure(stream, session.bind(stream.id, principal, weights), progress)

    def _new_stream(self, principal: Principal, body: dict[str, Any], kind: Any, number_field: str) -> Stream:
        session_id = _read(wire.text_field, body, "session_id")
        self._check_owner(principal, session_id, "session_id")
        return Stream(session_id, kind, _read(wire.number_of_session, body, number_field))

    def _check_owner(self, principal: Principal, session_id: str, field: str) -> None:
        if not self._cluster.owns(principal, session_id):
            raise _foreign(session_id, field)

    async def bound_model(self, principal: Principal, model_id: str, field: str, progress: Progress) -> Binding:
        """Where a model of this key is. Raises Refusal naming the field."""
        try:
            stream = parse_stream(model_id, field, "train")
        except MalformedId as error:
            raise Refusal(404, str(error)) from None
        return await self._bound(principal, stream, field, progress)

    async def _model(self, principal: Principal, model_id: str, progress: Progress) -> Binding:
        return await self.bound_model(principal, model_id, "model_id", progress)

    async def source(self, principal: Principal, path: str, field: str, progress: Progress) -> Binding:
        """Where a checkpoint is that the key may read. Raises Refusal naming the field."""
        try:
            stream = parse_tinker_path(path, field)
        except MalformedId as error:
            raise Refusal(400, str(error)) from None
        if not await self._may_read(principal, path, progress):
            raise _foreign(stream.session_id, field)
        return await self._existing(principal, stream, field, progress)

    async def _may_read(self, principal: Principal, path: str, progress: Progress) -> bool:
        """Whether a checkpoint is the key's own, the one that its Secret names, a published one, or a job's.

        The last for a person's key only.
        """
        try:
            stream = parse_tinker_path(path, "path")
        except MalformedId:
            return False
        if path == principal.checkpoint or self._cluster.owns(principal, stream.session_id):
            return True
        binding = await self._find(principal, stream, progress)
        if binding is None:
            return False
        if not principal.job and self._cluster.made_by_job(principal.namespace, stream.session_id, binding.job):
            return True
        return path in await self._published(binding, progress)

    async def readable_model(self, principal: Principal, run_id: str, progress: Progress) -> Binding:
        """Where a model is of which the key may read a checkpoint that another has published. Raises Refusal."""
        try:
            stream = parse_stream(run_id, "training_run_id", "train")
        except MalformedId as error:
            raise Refusal(404, str(error)) from None
        binding = await self._find(principal, stream, progress)
        if binding is None or not await self._published(binding, progress):
            raise _foreign(stream.session_id, "training_run_id")
        return binding

    async def _published(self, model: Binding, progress: Progress) -> set[str]:
        """Paths of the public checkpoints of a model; none while it has no pod and is to get none."""
        view = self._cluster.sessions.get((model.namespace, model.session))
        if view is None or not may_have_runs(view):
            return set()
        return await published(self._upstream, model, progress)

    async def _bound(self, principal: Principal, stream: Stream, field: str, progress: Progress) -> Binding:
        self._check_owner(principal, stream.session_id, field)
        return await self._existing(principal, stream, field, progress)

    async def _existing(self, principal: Principal, stream: Stream, field: str, progress: Progress) -> Binding:
        binding = await self._known(principal, stream, progress)
        if binding is None:
            raise Refusal(404, f"{field}: {stream.id!r} is not known; its storage may have been deleted")
        return binding

    async def _known(self, principal: Principal, stream: Stream, progress: Progress) -> Binding | None:
        """The binding of a stream; that of a model is written anew if it went with its claim."""
        binding = await self._find(principal, stream, progress)
        if binding is not None or stream.kind != "train":
            return binding
        found = await self._holders.find(principal, stream, progress)
        return None if found is None else await self._ensure(stream, found, progress)

    async def _find(self, principal: Principal, stream: Stream, progress: Progress) -> Binding | None:
        bindings = self._cluster.bindings
        progress.outage = self._cluster.api_outage_seconds
        return await until_available(lambda: bindings.get(principal.namespace, stream), progress)

    async def _ensure(self, stream: Stream, binding: Binding, progress: Progress) -> Binding:
        progress.outage = self._cluster.api_outage_seconds
        now = housed(binding, self._cluster.sessions.get((binding.namespace, binding.session)))
        return await until_available(lambda: self._cluster.bindings.ensure(stream, now), progress)


def _foreign(session_id: str, field: str) -> Refusal:
    where = "" if field == "session_id" else f"{field}: "
    return Refusal(403, f"{where}session_id {shorten(session_id)!r} was not created with this API key")


def _sampler(text: str) -> Stream:
    try:
        return parse_stream(text, "sampling_session_id", "sample")
    except MalformedId as error:
        raise Refusal(404, str(error)) from None


def _for_base_model(body: dict[str, Any], name: str) -> bytes:
    """A body that names an alias of the catalogue, which the pod does not know, with the name that it knows."""
    return _with(body, base_model=name)


def _with(body: dict[str, Any], **fields: Any) -> bytes:
    try:
        return json.dumps({**body, **fields}).encode()
    except RecursionError:
        raise Refusal(400, "body: nests too deeply") from None


def _json(body: bytes) -> dict[str, Any]:
    try:
        return wire.json_object(body)
    except wire.UndecodableBody as error:
        raise Refusal(400, str(error)) from None


def _read(reader: Callable[..., T], *arguments: Any) -> T:
    try:
        return reader(*arguments)
    except wire.UndecodableBody as error:
        raise Refusal(400, str(error)) from None
