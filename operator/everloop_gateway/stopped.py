"""What callers of a TrainingSession that was stopped for ever are told. Pure functions.

The SDK never sends the operations behind one whose submit was refused, and whoever waits for those waits for ever. So
numbered operations are acknowledged, as a session pod would, and end as failed ones: the SDK raises RequestFailedError
for each, and nothing hangs. None is kept anywhere, for none will ever run.
"""

from __future__ import annotations

from everloop_gateway import wire
from everloop_gateway.held import error_answer, json_answer
from everloop_gateway.holding import Kind
from everloop_gateway.upstream import Answer

GONE = 410


def stopped_answer(kind: Kind, stream: str, body: bytes, content_type: str, detail: str) -> Answer:
    """The answer to a call of this kind in a stream of such a session; `detail` says what was stopped.

    Raises UndecodableBody.
    """
    if kind is Kind.POLL:
        return json_answer({"error": detail, "category": "user"})
    if kind in (Kind.CREATE, Kind.TRAIN, Kind.SAVE):
        return json_answer({"request_id": f"{stream}:{_number(body, content_type)}"})
    return error_answer(GONE, detail)


def _number(body: bytes, content_type: str) -> int:
    """The operation's number; an operation that makes its model has none, and is the first."""
    if content_type == wire.PROTOBUF:
        return wire.protobuf_seq_id(body)
    value = wire.json_object(body)
    return 0 if value.get("seq_id") is None else wire.seq_id(value)
