"""Training runs and checkpoints of an API key, gathered from the session pods of its namespace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from everloop_gateway.calls import Calls
from everloop_gateway.cluster import Cluster
from everloop_gateway.held import error_answer, json_answer
from everloop_gateway.holders import get, may_have_runs
from everloop_gateway.ids import MalformedId, parse_stream, parse_tinker_path
from everloop_gateway.keys import Principal
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Gone
from everloop_gateway.stopped import GONE
from everloop_gateway.upstream import Answer, Progress, Upstream

LONGEST_PAGE = 1000


class Listings:
    """Answers listings. Each method waits for a pod that is being replaced, for its runs are part of the answer."""

    def __init__(self, cluster: Cluster, upstream: Upstream, calls: Calls) -> None:
        self._cluster = cluster
        self._upstream = upstream
        self._calls = calls

    async def runs(self, principal: Principal, limit: int, offset: int, progress: Progress) -> Answer:
        """One page of the key's runs, the one that was used last first."""
        found = await self._gather(principal, "training_runs", lambda run: run["training_run_id"], progress)
        found.sort(key=lambda run: run["last_request_time"], reverse=True)
        page = [_owned(run, principal) for run in found[offset : offset + limit]]
        return json_answer({"training_runs": page, "cursor": _cursor(limit, offset, len(found))})

    async def checkpoints(self, principal: Principal, limit: int, offset: int, progress: Progress) -> Answer:
        """One page of the key's checkpoints, newest first."""
        found = await self._gather(principal, "checkpoints", _run_of_checkpoint, progress)
        found.sort(key=lambda checkpoint: checkpoint["time"], reverse=True)
        page = found[offset : offset + limit]
        return json_answer({"checkpoints": page, "cursor": _cursor(limit, offset, len(found))})

    async def run(self, principal: Principal, run_id: str, progress: Progress) -> Answer:
        """One run."""
        answer = await self._of_run(principal, run_id, "", progress)
        return json_answer(_owned(json.loads(answer.body), principal)) if answer.status == 200 else answer

    async def run_checkpoints(self, principal: Principal, run_id: str, progress: Progress) -> Answer:
        """The checkpoints of one run, newest first."""
        return await self._of_run(principal, run_id, "/checkpoints", progress)

    async def _of_run(self, principal: Principal, run_id: str, below: str, progress: Progress) -> Answer:
        binding = await self._calls.bound_model(principal, run_id, "training_run_id", progress)
        answer = await self._upstream.deliver(binding, get(f"training_runs/{binding.id}{below}"), progress)
        return error_answer(GONE, answer.detail) if isinstance(answer, Gone) else answer

    async def _gather(
        self, principal: Principal, what: str, run_of: Callable[[dict[str, Any]], str], progress: Progress
    ) -> list[dict[str, Any]]:
        """What every pod of the namespace has of this key."""
        views = [view for view in self._cluster.sessions.in_namespace(principal.namespace) if may_have_runs(view)]
        answers = await asyncio.gather(
            *(self._upstream.deliver(view.bind(view.title, principal, None), get(what), progress) for view in views)
        )
        found: list[dict[str, Any]] = []
        for view, answer in zip(views, answers, strict=True):
            if isinstance(answer, Gone):
                continue
            if answer.status != 200:
                raise Refusal(answer.status, f"{view.title}: {answer.body.decode(errors='replace')[:200]}")
            found += json.loads(answer.body)[what]
        return [item for item in found if self._owns(principal, run_of(item))]

    def _owns(self, principal: Principal, run_id: str) -> bool:
        try:
            return self._cluster.owns(principal, parse_stream(run_id, "training_run_id", "train").session_id)
        except MalformedId:
            return False


def page_number(text: str | None, name: str, default: int, greatest: int) -> int:
    """A number of the query. Raises Refusal."""
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise Refusal(400, f"{name}: an integer >= 0 is required")
    return min(int(text), greatest)


def _run_of_checkpoint(checkpoint: dict[str, Any]) -> str:
    return parse_tinker_path(checkpoint["tinker_path"], "tinker_path").id


def _owned(run: dict[str, Any], principal: Principal) -> dict[str, Any]:
    return {**run, "model_owner": principal.subject}


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": total}
