"""What holds for the answer to any request, whatever is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not where schemathesis runs, which judges by this, too
    import httpx

LONGEST_SECONDS = 10.0
"""For an answer; requests that wait on purpose are not made here."""
LONGEST_DETAIL = 5000
"""Characters of a refusal."""
ALSO_NAMED = {
    *("optim_params", "optimizer_params", "adam_params", "data", "loss_fn", "loss_fn_config", "target", "a"),
    *("optim_step", "save_weights_external", "sample"),
}
"""What else a refusal may begin with: fields under another of their names, those of protobuf, operations as a whole."""
_HEADERS = {"body", "content-type", "content-encoding", "x-idempotency-key", "x-api-key"}
_OF_PATHS = {"checkpoint", "training_run_id", "sampler_id", "access_scope", "limit", "offset", "mac"}


def names(bodies: Iterable[Any]) -> set[str]:
    """The names of all fields in bodies, and those of what else a request has."""
    found = {*_HEADERS, *_OF_PATHS}
    for body in bodies:
        inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
        found |= {str(name) for name in body} if isinstance(body, dict) else set()
        found |= names(inner) if inner else set()
    return found


def check(answer: httpx.Response, fields: set[str]) -> None:
    """No defect, in time, and a refusal says in a few words which field it is about."""
    asked = answer.request
    told = f"{asked.method} {asked.url.path} {asked.content[:2000]!r}: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code < 500, told
    assert answer.elapsed.total_seconds() < LONGEST_SECONDS, told
    if answer.status_code >= 400 and answer.status_code != 408:
        assert names_a_field(answer.json()["detail"], fields), told


def names_a_field(detail: str, fields: set[str]) -> bool:
    """Whether a refusal begins with a field, and is short."""
    first = re.match(r"'?([A-Za-z_][\w-]*)", detail)
    return first is not None and first[1].lower() in fields and len(detail) < LONGEST_DETAIL


def outcome(answer: httpx.Response) -> str | None:
    """How an operation ended: None if well, else the error, which has to be the client's."""
    assert answer.status_code == 200, answer.text[:500]
    if not answer.headers["content-type"].startswith("application/json"):
        return None
    body = json.loads(answer.content)
    if "error" not in body:
        return None
    assert body["category"] == "user", body
    return str(body["error"])
