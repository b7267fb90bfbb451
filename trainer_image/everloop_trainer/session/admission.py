"""Whether an operation's content can be served, where the session itself must say so. Pure; names the field."""

from __future__ import annotations

import re

from everloop_trainer.session.operations import CreateModel, SaveWeights, SaveWeightsForSampler
from everloop_trainer.session.status import BaseModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def refuse_model(args: CreateModel, base: BaseModel, max_models: int, max_rank: int, models: int) -> str | None:
    """Why a model cannot be created, or None. `models` is how many exist already."""
    if args.base_model != base.name and args.base_model not in base.aliases:
        return f"base_model: {args.base_model!r} is not served here; this session serves {base.name!r}"
    if args.rank < 1:
        return f"lora_config.rank: must be positive, got {args.rank}"
    if args.rank > max_rank:
        return f"lora_config.rank: {args.rank} is above this session's adapters.maxRank of {max_rank}"
    if not (args.train_mlp or args.train_attn or args.train_unembed):
        return "lora_config: at least one of train_mlp, train_attn, train_unembed must be true"
    if models >= max_models:
        return f"create_model: this session already has {models} models, its adapters.maxModels"
    return None


def refuse_save(args: SaveWeights | SaveWeightsForSampler, existing: bool) -> str | None:
    """Why weights cannot be saved, or None. `existing` tells whether the name is taken."""
    if args.name is None:
        if isinstance(args, SaveWeightsForSampler) and args.sampling_session_seq_id is not None:
            return None
        return "path: a name is required"
    if NAME.fullmatch(args.name) is None:
        return f"path: {args.name!r} must be one segment of letters, digits, '.', '_' and '-'"
    if existing and not (isinstance(args, SaveWeights) and args.overwrite):
        return f"path: a checkpoint named {args.name!r} already exists"
    return None
