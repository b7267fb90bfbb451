"""Small random base models as transformers directories, with a tokenizer of 256 bytes and a few special tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 320
EOS = 257
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16)),
}


def make_model(path: Path, architecture: str = "llama") -> Path:
    """Write a random model to `path`; its logits are spread widely enough that greedy choices are clear."""
    torch.manual_seed(7)
    model = ARCHITECTURES[architecture]()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")
    wrapped.save_pretrained(path)
    return path
