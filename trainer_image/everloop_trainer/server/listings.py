"""Training runs and checkpoints in the shape of the SDK's types (`tinker/types/training_run.py`, `checkpoint.py`)."""

from __future__ import annotations

import json
from typing import Any

from everloop_trainer.session.history import Checkpoint
from everloop_trainer.session.service import Run

Body = dict[str, Any]
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def checkpoint_body(checkpoint: Checkpoint) -> Body:
    """SDK `Checkpoint`, of a named one."""
    stored = checkpoint.stored
    return {
        "checkpoint_id": f"{stored.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[stored.kind],
        "time": stored.time,
        "tinker_path": checkpoint.path,
        "size_bytes": stored.size,
        "public": checkpoint.public,
        "user_metadata": _texts(checkpoint.user_metadata),
        "expires_at": checkpoint.expires,
    }


def run_body(run: Run) -> Body:
    """SDK `TrainingRun`; its owner is left empty, only the gateway knows that."""
    newest = {
        kind: next((one for one in run.checkpoints if one.stored.kind == kind), None)
        for kind in ("weights", "sampler_weights")
    }
    return {
        "training_run_id": run.info.model_id,
        "model_owner": "",
        "base_model": run.info.base_model,
        "is_lora": True,
        "lora_rank": run.info.lora.rank,
        "corrupted": run.broken,
        "last_request_time": run.last_request,
        "last_checkpoint": _or_none(newest["weights"]),
        "last_sampler_checkpoint": _or_none(newest["sampler_weights"]),
        "user_metadata": _texts(run.info.user_metadata),
    }


def weights_body(run: Run) -> Body:
    """SDK `WeightsInfoResponse`."""
    lora = run.info.lora
    return {
        "base_model": run.info.base_model,
        "is_lora": True,
        "lora_rank": lora.rank,
        "train_unembed": lora.train_unembed,
        "train_mlp": lora.train_mlp,
        "train_attn": lora.train_attn,
    }


def checkpoints_body(runs: list[Run]) -> Body:
    """The checkpoints of these runs, newest first."""
    found = [checkpoint_body(checkpoint) for run in runs for checkpoint in run.checkpoints]
    return {"checkpoints": sorted(found, key=lambda body: str(body["time"]), reverse=True), "cursor": None}


def _or_none(checkpoint: Checkpoint | None) -> Body | None:
    return None if checkpoint is None else checkpoint_body(checkpoint)


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """The SDK sends any JSON and takes back texts only."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
