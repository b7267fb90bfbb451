"""Whether an operation's content can be served, where the session itself must say so. Pure; names the field."""

from __future__ import annotations

import re
from dataclasses import replace

from everloop_trainer.session.history import Checkpoint
from everloop_trainer.session.operations import CreateModel, LoadWeights, Save, SaveWeights, SaveWeightsForSampler
from everloop_trainer.session.ports import Lora, Room
from everloop_trainer.session.status import BaseModel
from everloop_trainer.session.times import refuse_ttl

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def refuse_model(args: CreateModel, base: BaseModel, max_models: int, max_rank: int, models: int) -> str | None:
    """Why a model cannot be created, or None. `models` is how many exist already."""
    error = _refuse_base_model(args.base_model, base)
    if error is not None:
        return error
    if args.rank < 1:
        return f"lora_config.rank: must be positive, got {args.rank}"
    if args.rank > max_rank:
        return f"lora_config.rank: {args.rank} is above this session's adapters.maxRank of {max_rank}"
    if not (args.train_mlp or args.train_attn or args.train_unembed):
        return "lora_config: at least one of train_mlp, train_attn, train_unembed must be true"
    return _refuse_another(args.KIND, max_models, models)


def refuse_memory(kind: str, lora: Lora, room: Room) -> str | None:
    """Why an engine has no room for one more adapter, in MiB, or None."""
    if room.needed <= room.free:
        return None
    return (
        f"{kind}: an adapter of rank {lora.rank} has {room.parameters:,} trained values and needs "
        f"{_mebibytes(room.needed)} with optimizer and gradients; {_mebibytes(max(0, room.free))} are free of the "
        f"{_mebibytes(room.total)} of {room.of}"
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def refuse_load(
    args: LoadWeights, source: Checkpoint, present: Lora | None, base: BaseModel, max_models: int, models: int
) -> str | None:
    """Why a checkpoint cannot be loaded, or None. `models` is how many exist already.

    `present` is the adapter of the model that is to be loaded into; None where the load creates the model.
    """
    if args.base_model is not None and (error := _refuse_base_model(args.base_model, base)) is not None:
        return error
    if source.stored.kind == "external_weights":
        return f"path: {args.path!r} was saved to be downloaded and can't be loaded; load a training checkpoint"
    if args.optimizer and source.stored.kind != "weights":
        return f"path: {args.path!r} holds no optimizer state; load it without, or load a training checkpoint"
    if present is None:
        return _refuse_another(args.KIND, max_models, models)
    if replace(present, seed=source.lora.seed) != source.lora:
        return f"path: {args.path!r} is an adapter of another shape ({source.lora}) than this model ({present})"
    return None


def _refuse_base_model(name: str, base: BaseModel) -> str | None:
    if name != base.name and name not in base.aliases:
        return f"base_model: {name!r} is not served here; this session serves {base.name!r}"
    return None


def _refuse_another(kind: str, max_models: int, models: int) -> str | None:
    if models >= max_models:
        return f"{kind}: this session already has {models} models, its adapters.maxModels"
    return None


def refuse_save(args: Save, existing: bool) -> str | None:
    """Why weights cannot be saved, or None. `existing` tells whether the name is taken."""
    if args.name is None:
        if isinstance(args, SaveWeightsForSampler) and args.sampling_session_seq_id is not None:
            return None
        return "path: a name is required"
    if NAME.fullmatch(args.name) is None:
        return f"path: {args.name!r} must be one segment of letters, digits, '.', '_' and '-'"
    if existing and not (isinstance(args, SaveWeights) and args.overwrite):
        return f"path: a checkpoint named {args.name!r} already exists"
    return refuse_ttl(args.ttl_seconds)
