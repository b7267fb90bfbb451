"""The frozen base model, its tokenizer, and the identity of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from everloop_trainer.engine.attention import IMPLEMENTATION, Row
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.images import Image, ImageLimits, ImageReader
from everloop_trainer.engine.inputs import Limits
from everloop_trainer.engine.lora import Adapter, AdapterSlot, Target, find_targets

if TYPE_CHECKING:
    from everloop_trainer.engine.vision import Sight, Vision

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_SEEING = ("Qwen3VLForConditionalGeneration",)
ROWS = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class BaseModel:
    """A decoder with frozen weights whose forward pass is split at the head.

    Attributes:
        vocab_size: number of token ids.
        max_sequence_length: tokens.
        eos_ids: token ids that end a text.
        targets: modules that can carry a LoRA term.
        files_sha256: hash over names and contents of all files of the model directory.
        limits: what a sequence may be.
        reserved: token ids int64 that stand for what is no text; they are never sampled.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: SpareConfig, files_sha256: str, vision: Vision | None = None
    ) -> None:
        text = model.config.get_text_config()
        limit = text.max_position_embeddings
        if config.max_sequence_length > limit:
            raise ValueError(f"max_sequence_length {config.max_sequence_length} exceeds the base model's {limit}")
        model.eval()
        model.requires_grad_(False)
        # Takes effect on layers in training mode only, which `hidden` turns on for the layers alone.
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        self._decoder: nn.Module = model.base_model
        self._vision = vision
        trained: nn.Module = model if vision is None else model.base_model.language_model
        self._layers = [module for module in trained.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._head: nn.Module = model.get_output_embeddings()
        self.tokenizer = tokenizer
        self.name = config.base_model
        self.vocab_size = int(text.vocab_size)
        self.max_sequence_length = config.max_sequence_length
        self.eos_ids = _eos_ids(model)
        self.files_sha256 = files_sha256
        reader = None if vision is None else vision.reader
        self.limits = Limits(self.vocab_size, self.max_sequence_length, self.name, reader)
        self.reserved = np.array(sorted(reader.reserved) if reader is not None else [], np.int64)
        self.targets: tuple[Target, ...] = find_targets(model, self._head)
        self._slot = AdapterSlot(model, self.targets)

    def use(self, adapter: Adapter | None) -> None:
        """Let `adapter` take part in the following forward passes; None is the base model alone."""
        self._slot.active = adapter

    def see(self, tokens: torch.Tensor, images: Sequence[Sequence[Image]]) -> Sight | None:
        """Return what `hidden` needs to know of the images of each row of `tokens`; None if there are none.

        Raises ContentError if a file cannot be decoded.
        """
        if not any(images):
            return None
        assert self._vision is not None, "images are refused where they are read"
        return self._vision.see(tokens, images)

    def hidden(
        self, tokens: torch.Tensor, cache: Any = None, *, recompute: bool = False, sight: Sight | None = None
    ) -> torch.Tensor:
        """Return the last hidden states (rows, length, hidden) of `tokens` int64 (rows, length).

        Rows may be padded on the right with any token: attention is causal, so padding changes nothing before it.
        With a `cache` (transformers DynamicCache) the tokens continue what is in it. With `recompute`, the backward
        pass computes each layer again instead of keeping its activations (Chen et al., 2016): a third more work for
        a fraction of the memory.
        """
        for layer in self._layers:
            layer.training = recompute
        seen = {} if sight is None else sight.arguments()
        return self._decoder(input_ids=tokens, cache=cache, use_cache=cache is not None, **seen).last_hidden_state

    def decode(self, rows: Sequence[Row], adapters: Sequence[Adapter | None]) -> torch.Tensor:
        """Put the last token of each row through the model and return float32 logits (rows, vocab_size) after it.

        Each row has an adapter of its own, or None.

        The batch is filled up to a multiple of 8: the bits of a row in a linear layer are the same for all of these.
        """
        for layer in self._layers:
            layer.training = False
        filling = [0] * (-len(rows) % ROWS)
        tokens = torch.tensor([*(row.last for row in rows), *filling])[:, None]
        positions = torch.tensor([*(row.length + row.offset for row in rows), *filling])[:, None]
        with self._slot.mixed([*adapters, *[None] * len(filling)]):
            found = self._decoder(input_ids=tokens, position_ids=positions, use_cache=False, rows=rows)
            logits = self.logits(found.last_hidden_state[:, 0])[: len(rows)]
        for row in rows:
            row.length += 1
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (n, vocab_size) of hidden states (n, hidden)."""
        return self._head(hidden).float()


def load_base(config: SpareConfig) -> BaseModel:
    """Load and freeze the base model, without network.

    Raises:
        ValueError: the architecture is not supported or too short for the configured sequence length.
        OSError: the directory is not a complete transformers model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    path = config.model_path
    architectures = AutoConfig.from_pretrained(path, local_files_only=True).architectures or []
    supported = (*_ARCHITECTURES, *_SEEING)
    if not set(architectures) & set(supported):
        raise ValueError(f"{path}: unsupported architecture {architectures}; supported: {', '.join(supported)}")
    sees = bool(set(architectures) & set(_SEEING))
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
        path,
        dtype=_DTYPES[config.dtype],
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        use_safetensors=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    vision = _vision(model, config) if sees else None
    return BaseModel(model, tokenizer, config, manifest_sha256(path), vision)


def _vision(model: Any, config: SpareConfig) -> Vision:
    from transformers import AutoImageProcessor

    from everloop_trainer.engine.vision import Vision

    # Of the two kinds of processors this one needs nothing but Pillow and numpy, and starts no thread.
    processor = AutoImageProcessor.from_pretrained(config.model_path, backend="pil", local_files_only=True)
    limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
    placeholder, video = model.config.image_token_id, model.config.video_token_id
    reader = ImageReader(processor, limits, config.base_model, placeholder, frozenset({placeholder, video}))
    return Vision(model.base_model, reader)


def manifest_sha256(directory: Path) -> str:
    """Hash a model directory: SHA-256 over the sorted lines `<relative name> <hex sha256 of content>` + newline.

    Anything whose name or folder starts with a dot (mount and download book-keeping) is left out.
    """
    lines = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            with path.open("rb") as file:
                lines.append(f"{name.as_posix()} {hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _eos_ids(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
