"""What a key does to its own checkpoints: the calls that change one, which carry no number."""

from __future__ import annotations

from dataclasses import dataclass

from everloop_gateway import wire
from everloop_gateway.calls import Calls
from everloop_gateway.held import error_answer
from everloop_gateway.holding import Kind
from everloop_gateway.ids import MalformedId, parse_tinker_path
from everloop_gateway.keys import Principal
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Gone
from everloop_gateway.stopped import GONE
from everloop_gateway.upstream import Answer, Call, Progress, Upstream

IDEMPOTENCY_HEADER = "X-Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Change:
    """One call: `method` and what comes behind the checkpoint's own path, empty or like ``/ttl``.

    `repeat` is its idempotency key: it may be sent again and again, and is one call for the session pod.
    """

    method: str
    below: str
    run_id: str
    kind: str
    name: str
    body: bytes
    repeat: str


class Checkpoints:
    """Forwards changes of checkpoints to the pod that has them."""

    def __init__(self, upstream: Upstream, calls: Calls) -> None:
        self._upstream = upstream
        self._calls = calls

    async def change(self, principal: Principal, change: Change, progress: Progress) -> Answer:
        """Only the key that owns the run may; waits for a pod that is being replaced. Raises Refusal."""
        try:
            parse_tinker_path(f"tinker://{change.run_id}/{change.kind}/{change.name}", "checkpoint")
        except MalformedId as error:
            raise Refusal(404, str(error)) from None
        binding = await self._calls.bound_model(principal, change.run_id, "training_run_id", progress)
        path = f"{wire.PREFIX}/training_runs/{binding.id}/checkpoints/{change.kind}/{change.name}{change.below}"
        headers = {IDEMPOTENCY_HEADER: change.repeat}
        call = Call(Kind.QUERY, path, change.body, wire.JSON, wire.JSON, headers, change.method)
        answer = await self._upstream.deliver(binding, call, progress)
        return error_answer(GONE, answer.detail) if isinstance(answer, Gone) else answer
