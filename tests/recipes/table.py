"""The recipes that are run, in the smallest size in which each still makes every kind of call that it makes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.recipes.place import MODEL

COOKBOOK = "tinker_cookbook.recipes"
LOG = ("log_path=log", "behavior_if_log_dir_exists=delete")
SMALL = ("max_steps=2", "lora_rank=8")


@dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
        command: what Python is told to run.
        losses: loss functions of its training passes, all of which must occur.
        samples: whether it samples.
        steps: how many optim_step it makes at least.
    """

    command: tuple[str, ...]
    losses: frozenset[str]
    samples: bool
    steps: int = 2


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"{COOKBOOK}.{name}", f"model_name={MODEL}", *arguments)


CROSS_ENTROPY = frozenset({"cross_entropy"})
IMPORTANCE_SAMPLING = frozenset({"importance_sampling"})

RECIPES = {
    "sl_loop": Recipe(_module("sl_loop", "batch_size=4", *SMALL), CROSS_ENTROPY, samples=False),
    "chat_sl": Recipe(
        _module("chat_sl.train", "dataset=chat.jsonl", "batch_size=4", *SMALL, *LOG), CROSS_ENTROPY, samples=False
    ),
    "rl_loop": Recipe(
        _module(
            "rl_loop",
            "loss_fn=importance_sampling",
            "batch_size=4",
            "group_size=4",
            "max_tokens=24",
            "max_steps=4",
            "lora_rank=8",
        ),
        IMPORTANCE_SAMPLING,
        samples=True,
        steps=1,  # a batch whose groups are all right or all wrong has none
    ),
    "math_rl_arithmetic": Recipe(
        _module(
            "math_rl.train",
            "env=arithmetic",
            "loss_fn=importance_sampling",
            "group_size=4",
            "groups_per_batch=4",
            "max_tokens=5",
            "eval_every=0",
            *SMALL,
            *LOG,
        ),
        IMPORTANCE_SAMPLING,
        samples=True,
    ),
    "math_rl_gsm8k": Recipe(
        _module(
            "math_rl.train",
            "env=gsm8k",
            "loss_fn=importance_sampling",
            "group_size=6",
            "groups_per_batch=3",
            "max_tokens=24",
            *SMALL,
            *LOG,
        ),
        IMPORTANCE_SAMPLING,
        samples=True,
        steps=0,
    ),
    "dpo": Recipe(_module("preference.dpo.train", "batch_size=4", "max_steps=2", *LOG), CROSS_ENTROPY, samples=True),
    "shorter": Recipe(
        _module(
            "preference.shorter.train",
            "renderer_name=qwen3_instruct",
            "batch_size=2",
            "group_size=4",
            "max_tokens=8",
            "eval_every=0",
            "max_steps=2",
            *LOG,
        ),
        IMPORTANCE_SAMPLING,
        samples=True,
    ),
    "on_policy_distillation": Recipe(
        _module(
            "distillation.on_policy_distillation",
            f"teacher_model={MODEL}",
            "dataset=deepmath",
            "group_size=2",
            "groups_per_batch=2",
            "max_tokens=8",
            *SMALL,
            *LOG,
        ),
        IMPORTANCE_SAMPLING,
        samples=True,
    ),
    "off_policy_reasoning": Recipe(
        _module(
            "distillation.off_policy_reasoning",
            "renderer_name=qwen3_instruct",
            "batch_size=2",
            "buffer_size=8",
            "max_prompts=8",
            *SMALL,
            *LOG,
        ),
        CROSS_ENTROPY,
        samples=False,
    ),
    "off_policy_distillation": Recipe(("off_policy.py",), CROSS_ENTROPY, samples=True),
    "sdft": Recipe(
        _module("sdft.train", "groups_per_batch=2", "max_tokens=8", "topk=5", "eval_every=0", *SMALL, *LOG),
        CROSS_ENTROPY,
        samples=True,
    ),
}
