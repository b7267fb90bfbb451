"""A random Qwen3-VL as a directory that transformers loads; written without torch. An image has 1 to 16 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.server.tinymodel import write_tokenizer

NAME = "everloop/tiny-vl"
VOCABULARY = 320
START, END, IMAGE, VIDEO = 316, 317, 318, 319
"""What stands around an image, and for its parts and those of a video."""
HIDDEN = 64
LAYERS = 3
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD = 16
MLP = 96
MAX_LENGTH = 512
EYE = 32
EYE_LAYERS = 2
EYE_MLP = 48
PATCH = 8
MERGED = 2 * 2 * EYE
PLACES = 16


def write_tiny_seeing_model(directory: Path) -> None:
    """Writes configurations and model.safetensors (float32, output head tied to the embedding).

    A token of an image is 16 x 16 pixels of it after resizing, which leaves it 256 to 4,096 pixels.
    """
    directory.mkdir(parents=True)
    values = _Values()
    tensors = _language(values) | _vision(values)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": EYE_LAYERS,
        "hidden_size": EYE,
        "intermediate_size": EYE_MLP,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": PLACES,
        "deepstack_visual_indexes": list(range(EYE_LAYERS)),
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(directory)


class _Values:
    """Random ones, the same each time."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(7)

    def matrix(self, *shape: int, scale: float = 0.08) -> np.ndarray:
        return self._rng.normal(0.0, scale, shape).astype(np.float32)

    def linear(self, name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": self.matrix(outputs, inputs), f"{name}.bias": self.matrix(outputs)}


def _language(values: _Values) -> dict[str, np.ndarray]:
    prefix = "model.language_model"
    tensors = {
        f"{prefix}.embed_tokens.weight": values.matrix(VOCABULARY, HIDDEN, scale=0.2),
        f"{prefix}.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in (f"{prefix}.layers.{index}" for index in range(LAYERS)):
        tensors |= {
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.self_attn.q_proj.weight": values.matrix(HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": values.matrix(KEY_VALUE_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": values.matrix(KEY_VALUE_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": values.matrix(HIDDEN, HEADS * HEAD),
            f"{layer}.self_attn.q_norm.weight": np.ones(HEAD, np.float32),
            f"{layer}.self_attn.k_norm.weight": np.ones(HEAD, np.float32),
            f"{layer}.mlp.gate_proj.weight": values.matrix(MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": values.matrix(MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": values.matrix(HIDDEN, MLP),
        }
    return tensors


def _vision(values: _Values) -> dict[str, np.ndarray]:
    prefix = "model.visual"
    tensors = {f"{prefix}.pos_embed.weight": values.matrix(PLACES, EYE)}
    tensors[f"{prefix}.patch_embed.proj.weight"] = values.matrix(EYE, 3, 2, PATCH, PATCH)
    tensors[f"{prefix}.patch_embed.proj.bias"] = np.zeros(EYE, np.float32)
    for block in (f"{prefix}.blocks.{index}" for index in range(EYE_LAYERS)):
        tensors |= _norm(f"{block}.norm1", EYE) | _norm(f"{block}.norm2", EYE)
        tensors |= values.linear(f"{block}.attn.qkv", EYE, 3 * EYE) | values.linear(f"{block}.attn.proj", EYE, EYE)
        tensors |= values.linear(f"{block}.mlp.linear_fc1", EYE, EYE_MLP) | values.linear(
            f"{block}.mlp.linear_fc2", EYE_MLP, EYE
        )
    mergers = {f"{prefix}.deepstack_merger_list.{index}": MERGED for index in range(EYE_LAYERS)}
    for merger, normed in ({f"{prefix}.merger": EYE} | mergers).items():
        tensors |= _norm(f"{merger}.norm", normed)
        tensors |= values.linear(f"{merger}.linear_fc1", MERGED, MERGED) | values.linear(
            f"{merger}.linear_fc2", MERGED, HIDDEN
        )
    return tensors


def _norm(name: str, size: int) -> dict[str, np.ndarray]:
    return {f"{name}.weight": np.ones(size, np.float32), f"{name}.bias": np.zeros(size, np.float32)}
