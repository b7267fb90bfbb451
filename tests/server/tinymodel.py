"""A random Llama of 2 layers as a directory that transformers loads; written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NAME = "everloop/tiny-llama"
VOCABULARY = 320
HIDDEN = 64
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
MLP = 128
MAX_LENGTH = 512


def write_tiny_model(directory: Path) -> None:
    """Writes config.json and model.safetensors (float32, output head tied to the embedding)."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 0.08, (rows, columns)).astype(np.float32)

    head = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KEY_VALUE_HEADS * head, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KEY_VALUE_HEADS * head, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head),
            f"{prefix}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": head,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Writes one that has a word for each token."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"w{token}": token for token in range(VOCABULARY)}, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
