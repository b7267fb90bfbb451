"""What a spare is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class SpareConfig:
    """Settings of a spare and of every engine forked from it; results depend on all but the socket.

    Attributes:
        socket: path of the unix socket to listen on.
        model_path: transformers directory of the base model.
        base_model: name of the base model, told in `hello`.
        dtype: of the base weights and activations; adapters and optimizer are always float32.
        threads: intra-op threads of an engine.
        max_rank: greatest LoRA rank that is accepted.
        max_sequence_length: tokens; longest training sequence, and prompt plus completion when sampling.
        micro_batch_tokens: padded tokens computed at once in training; a longer sequence goes alone, and its
            activations are computed again in the backward pass instead of kept.
        max_image_bytes: of one image as it is sent.
        max_image_pixels: of one image once it is decoded.
    """

    socket: Path
    model_path: Path
    base_model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    max_rank: int = 128
    max_sequence_length: int = 2048
    micro_batch_tokens: int = 512
    max_image_bytes: int = 8 << 20
    max_image_pixels: int = 1 << 24
