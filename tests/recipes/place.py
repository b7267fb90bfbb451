"""The working directory of a recipe without a network: a tokenizer and data sets where their names look for them.

The recipes of tinker-cookbook ask for a model that their table knows. Its weights here are those of SmolLM2, whose
tokenizer has the marks of the same chat format as single tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
OFF_POLICY = f"""
import asyncio
import sys

from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer="{MODEL}", renderer_name="qwen3_instruct", max_length=64, batch_size=2
)
pair = train_off_policy.DatasetWithTeacher(
    dataset_builder=FromConversationFileBuilder(common_config=common, file_path="chat.jsonl"),
    teacher_config=TeacherConfig(base_model="{MODEL}"),
)
config = train_off_policy.Config(
    learning_rate=1e-4, model_name="{MODEL}", recipe_name="off_policy", renderer_name="qwen3_instruct", lora_rank=8,
    n_teacher_targets=5, batch_size=2, max_steps=2, log_path="log", dataset_configs=[pair],
)
asyncio.run(train_off_policy.main(config))
"""
"""The cookbook has no command of its own for distillation from a teacher's likeliest tokens."""


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(place: Path, weights: Path) -> None:
    """Fill an empty directory; `weights` is a transformers directory with a tokenizer."""
    tokenizer = place / MODEL
    tokenizer.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(weights / name, tokenizer)
    sums = [(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(24)]
    conversations: list[Any] = [{"messages": _chat(*pair)} for pair in sums]
    _write(place / "chat.jsonl", conversations)
    no_robots = [row | {"prompt_id": str(n), "category": "Open QA"} for n, row in enumerate(conversations[:12])]
    _write(place / "HuggingFaceH4/no_robots/train.jsonl", no_robots)
    _write(place / "HuggingFaceH4/no_robots/test.jsonl", no_robots[:2])
    # Of 288 answers of 24 tokens 39 were right: of many some are, and rl_loop trains on groups that differ only.
    gsm8k = [{"question": "Say \\boxed{3}.", "answer": "It is 3.\n#### 3"}] * 16
    _write(place / "openai/gsm8k/main/train.jsonl", gsm8k)
    _write(place / "openai/gsm8k/main/test.jsonl", gsm8k[:1])
    (place / "openai/gsm8k/README.md").write_text(GSM8K_CARD)
    pairs = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: I don't know.",
        }
        for question, answer in sums[:12]
    ]
    _write(place / "Anthropic/hh-rlhf/train.jsonl", pairs)
    _write(place / "Anthropic/hh-rlhf/test.jsonl", pairs[:1])
    _write(
        place / "zwhe99/DeepMath-103K/train.jsonl",
        [{"question": f"What is {n} times {n}?", "final_answer": str(n * n)} for n in range(12)],
    )
    _write(
        place / "open-thoughts/OpenThoughts3-1.2M/train.jsonl",
        [
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
            for question, answer in sums[:12]
        ],
    )
    _write(
        place / "hicai-zju/SciKnowEval/test.jsonl",
        [
            {
                "domain": "Chemistry",
                "details": {"level": "L3"},
                "type": "mcq-2-choices",
                "question": f"Which element has the number {1 + n % 2}?",
                "choices": {"label": ["A", "B"], "text": ["hydrogen", "helium"]},
                "answerKey": "AB"[n % 2],
            }
            for n in range(20)
        ],
    )
    (place / "off_policy.py").write_text(OFF_POLICY)


def environment(url: str, key: str, place: Path) -> dict[str, str]:
    """What a recipe's process is given: where to train, and that there is no network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(place / "runs"),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
