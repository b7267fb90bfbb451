"""What schemathesis is told of a gateway beyond its document: what is there, and what holds for each answer.

Run by the interpreter of the environment that holds schemathesis.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.fuzz import answers, messages

GIVEN = json.loads(Path(os.environ["EVERLOOP_WIRE"]).read_text())
"""See `tests.acceptance.test_wire.given`."""
KNOWN: dict[str, list[str]] = GIVEN["known"]
IN_PATHS: dict[str, list[str]] = GIVEN["in_paths"]
FIELDS = answers.ALSO_NAMED | answers.names([]) | set(GIVEN["fields"])
NARROWER = set(GIVEN["narrower"])
MOST_SAMPLES = MOST_TOKENS = 4
"""Of what is sampled: any number may be asked for, and an engine would do it all."""
SHORT_SECONDS = 0.1
"""Of a poll."""
_FIRST_NEW = 1000

acknowledged: set[str] = set()
_new = itertools.count(_FIRST_NEW)


def next_number(stream: str) -> int:
    """The lowest that was not acknowledged."""
    return next(number for number in itertools.count(1) if f"{stream}:{number}" not in acknowledged)


VALID = [bytes.fromhex(each) for each in GIVEN["protobuf"]]
schemathesis.openapi.media_type(
    "application/x-protobuf", st.sampled_from(VALID).flatmap(messages.broken) | st.sampled_from(VALID)
)


@schemathesis.hook  # type: ignore[untyped-decorator]  # its types are in another environment
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Let most requests be about what is there: else each would be refused for its id, whatever else it holds."""
    drawn = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode())
    if isinstance(case.body, dict):
        case.body = _soon_answered(case.body)
    if drawn % 4 == 0:
        return
    for name, value in (case.path_parameters or {}).items():
        if isinstance(value, str):
            case.path_parameters[name] = _known(IN_PATHS, case, name, value, drawn)
    if isinstance(case.body, bytes):
        case.body = messages.numbered(case.body, next_number(KNOWN["model_id"][0]))
    elif isinstance(case.body, dict):
        case.body = _about_what_is_there(case, case.body, drawn)
        if drawn % 4 > 1:
            _give_address(case, case.body)


def _about_what_is_there(case: Any, body: dict[str, Any], drawn: int) -> dict[str, Any]:
    """The body with ids that exist, numbers whose turn it is, and so little to do that it is soon done."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, str):
            found[name] = _known(KNOWN, case, name, value, drawn)
        elif name in ("target", "sampling_params") and isinstance(value, dict):
            found[name] = _about_what_is_there(case, value, drawn)
        else:
            found[name] = value
    for name, most in (("num_samples", MOST_SAMPLES), ("max_tokens", MOST_TOKENS)):
        if _is_number(found.get(name)):
            found[name] = min(found[name], most)
    if isinstance(params := found.get("sampling_params"), dict) and params.get("max_tokens") is None:
        params["max_tokens"] = MOST_TOKENS
    _take_turn(found)
    return found


def _soon_answered(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a poll that waits less long than the reader of its answer; every other body as it is."""
    seconds = body.get("timeout", SHORT_SECONDS)
    if not isinstance(body.get("target"), dict) or not (seconds is None or _is_number(seconds)):
        return body
    return {**body, "timeout": SHORT_SECONDS if seconds is None else min(seconds, SHORT_SECONDS)}


def _give_address(case: Any, body: dict[str, Any]) -> None:
    """What the SDK always sends, although its types allow for none."""
    names = GIVEN["addresses"].get(case.operation.label, [])
    if "model_seq_id" in names:
        names = [name for name in names if (name in ("model_id", "seq_id")) == ("model_id" in body)]
    for name in names:
        if body.get(name) is None:
            body[name] = KNOWN[name][0] if name in KNOWN else 1
    _take_turn(body)


def _take_turn(found: dict[str, Any]) -> None:
    """Let numbers be those that are next."""
    stream = found.get("model_id") or found.get("sampling_session_id")
    if isinstance(stream, str) and _is_number(found.get("seq_id")):
        found["seq_id"] = next_number(stream)
    if _is_number(found.get("model_seq_id")):
        found["model_seq_id"] = next(_new)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _known(known: dict[str, list[str]], case: Any, name: str, value: str, drawn: int) -> str:
    there = known.get(f"{case.operation.label} {name}", known.get(name))
    return value if there is None else there[drawn // 4 % len(there)]


@schemathesis.hook  # type: ignore[untyped-decorator]  # its types are in another environment
def after_call(context: Any, case: Any, response: Any) -> None:
    """Write down what was answered, for the test that has started this."""
    request_id = None
    if response.status_code == 200 and response.headers.get("content-type") == ["application/json"]:
        answer = json.loads(response.content)
        if case.operation.path.endswith("/create_custom_loss"):
            answer = {}  # a loss is kept nowhere but in its id
        request_id = answer.get("request_id")
    acknowledged.update([request_id] if request_id else [])
    line = {
        "operation": case.operation.label,
        "method": case.method,
        "status": response.status_code,
        "request_id": request_id,
        "sampler": _sampler(case) if response.status_code == 200 else None,
        "detail": response.content.decode(errors="replace")[:200] if response.status_code >= 400 else "",
    }
    with Path(GIVEN["log"]).open("a") as log:
        log.write(json.dumps(line) + "\n")


def _sampler(case: Any) -> str | None:
    """The sampling session that a request makes."""
    body = case.body if isinstance(case.body, dict) else {}
    number = body.get("sampling_session_seq_id")
    session = str(body.get("session_id") or body.get("model_id")).partition(":")[0]
    return None if number is None else f"{session}:sample:{number}"


@schemathesis.check  # type: ignore[untyped-decorator]  # as above
def refusal_names_a_field(ctx: Any, response: Any, case: Any) -> None:
    """Each one, in a few words; what the document allows is refused only for what the document can't tell."""
    if not 400 <= response.status_code < 500 or response.status_code == 408:
        return
    detail = json.loads(response.content)["detail"]
    told = f"{response.status_code} {detail[:500]!r}"
    if case.method.upper() != case.operation.method.upper():
        assert response.status_code in (404, 405), told
        return
    assert answers.names_a_field(detail, FIELDS), f"names no field: {told}"
    readable = not isinstance(case.body, bytes)  # of protobuf the document says nothing
    if readable and case.meta is not None and case.meta.generation.mode.is_positive:
        assert answers.names_a_field(detail, NARROWER), f"the document allows it: {told}"
