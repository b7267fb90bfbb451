"""Training runs and checkpoints of an API key, gathered from the session pods of its namespace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everloop_gateway.calls import Calls
from everloop_gateway.client_sessions import ClientSession, merged
from everloop_gateway.cluster import Cluster
from everloop_gateway.held import error_answer, json_answer
from everloop_gateway.holders import get, may_have_runs
from everloop_gateway.ids import MalformedId, parse_stream, parse_tinker_path, shorten
from everloop_gateway.keys import Principal
from everloop_gateway.projects import refuse_other_projects
from everloop_gateway.published import as_seen_by_others
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Binding, Gone
from everloop_gateway.stopped import GONE
from everloop_gateway.upstream import Answer, Progress, Upstream

LONGEST_PAGE = 1000
DEFAULT_PAGE = 20
"""Items of a listing that does not say how many it wants, as the SDK has it."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a key asks of a listing; `accessible` includes what others have published."""

    principal: Principal
    limit: int
    offset: int
    accessible: bool


def page(principal: Principal, query: Mapping[str, str]) -> Page:
    """What the query asks for. Raises Refusal."""
    refuse_other_projects(query.get("project_id"), principal.namespace, "project_id")
    limit = page_number(query.get("limit"), "limit", DEFAULT_PAGE, LONGEST_PAGE)
    offset = page_number(query.get("offset"), "offset", 0, 10**9)
    return Page(principal, limit, offset, accessible(query))


def accessible(query: Mapping[str, str]) -> bool:
    """Whether the query's `access_scope` goes beyond what the key owns. Raises Refusal."""
    scope = query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise Refusal(400, f"access_scope: {shorten(scope)!r} is neither 'owned' nor 'accessible'")
    return scope == "accessible"


class Listings:
    """Answers listings. Each method waits for a pod that is being replaced, for its runs are part of the answer."""

    def __init__(self, cluster: Cluster, upstream: Upstream, calls: Calls) -> None:
        self._cluster = cluster
        self._upstream = upstream
        self._calls = calls

    async def runs(self, asked: Page, progress: Progress) -> Answer:
        """One page of the key's runs, the one that was used last first; also those of which others published some."""
        every = await self._gather(asked.principal, "training_runs", progress)
        found = [_owned(run, asked.principal) for run in every if self._owns(asked.principal, run["training_run_id"])]
        if asked.accessible:
            checkpoints = await self._gather(asked.principal, "checkpoints", progress)
            public = {_run_of_checkpoint(each) for each in checkpoints if each.get("public")}
            public -= {run["training_run_id"] for run in found}
            found += [as_seen_by_others(run) for run in every if run["training_run_id"] in public]
        found.sort(key=lambda run: run["last_request_time"], reverse=True)
        page = found[asked.offset : asked.offset + asked.limit]
        return json_answer({"training_runs": page, "cursor": _cursor(asked, len(found))})

    async def checkpoints(self, asked: Page, progress: Progress) -> Answer:
        """One page of the key's checkpoints, newest first."""
        every = await self._gather(asked.principal, "checkpoints", progress)
        found = [each for each in every if self._owns(asked.principal, _run_of_checkpoint(each))]
        found.sort(key=lambda checkpoint: checkpoint["time"], reverse=True)
        page = found[asked.offset : asked.offset + asked.limit]
        return json_answer({"checkpoints": page, "cursor": _cursor(asked, len(found))})

    async def client_sessions(self, principal: Principal, progress: Progress) -> list[ClientSession]:
        """The key's sessions, newest first, as far as they have made something."""
        every = await self._gather(principal, "sessions", progress)
        return merged(each for each in every if self._cluster.owns(principal, each["session_id"]))

    async def run(self, principal: Principal, run_id: str, accessible: bool, progress: Progress) -> Answer:
        """One run; with `accessible`, also another key's of which it has published a checkpoint."""
        if accessible and not self._owns(principal, run_id):
            binding = await self._calls.readable_model(principal, run_id, progress)
            answer = await self._ask(binding, "", progress)
            return json_answer(as_seen_by_others(json.loads(answer.body))) if answer.status == 200 else answer
        answer = await self._of_run(principal, run_id, "", progress)
        return json_answer(_owned(json.loads(answer.body), principal)) if answer.status == 200 else answer

    async def run_checkpoints(self, principal: Principal, run_id: str, progress: Progress) -> Answer:
        """The checkpoints of one run, newest first."""
        return await self._of_run(principal, run_id, "/checkpoints", progress)

    async def _of_run(self, principal: Principal, run_id: str, below: str, progress: Progress) -> Answer:
        return await self._ask(
            await self._calls.bound_model(principal, run_id, "training_run_id", progress), below, progress
        )

    async def _ask(self, binding: Binding, below: str, progress: Progress) -> Answer:
        answer = await self._upstream.deliver(binding, get(f"training_runs/{binding.id}{below}"), progress)
        return error_answer(GONE, answer.detail) if isinstance(answer, Gone) else answer

    async def _gather(self, principal: Principal, what: str, progress: Progress) -> list[dict[str, Any]]:
        """What every pod of the namespace has, of whatever key."""
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
        return found

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


def _cursor(asked: Page, total: int) -> dict[str, int]:
    return {"limit": asked.limit, "offset": asked.offset, "total_count": total}
