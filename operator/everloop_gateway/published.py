"""Checkpoints that their owner has published: what others of the namespace may read."""

from __future__ import annotations

import json
from typing import Any

from everloop_gateway.holders import get
from everloop_gateway.routing import Binding
from everloop_gateway.upstream import Answer, Progress, Upstream


async def published(upstream: Upstream, model: Binding, progress: Progress) -> set[str]:
    """Paths of the public checkpoints of a model; its pod is asked, and waited for. Raises ApiRefused."""
    answer = await upstream.deliver(model, get(f"training_runs/{model.id}/checkpoints"), progress)
    if not isinstance(answer, Answer) or answer.status != 200:
        return set()
    return {one["tinker_path"] for one in json.loads(answer.body)["checkpoints"] if one.get("public")}


def as_seen_by_others(run: dict[str, Any]) -> dict[str, Any]:
    """A training run for who may read a checkpoint of it: nothing of its owner, and of what is not public."""
    newest = {name: run.get(name) for name in ("last_checkpoint", "last_sampler_checkpoint")}
    shown = {name: one if one is not None and one.get("public") else None for name, one in newest.items()}
    return {**run, **shown, "model_owner": "", "user_metadata": None}
