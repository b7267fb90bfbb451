"""LoRA adapters (Hu et al., 2021) over a frozen base: y = W x + (alpha / rank) B A x, in float32.

The base model keeps its own modules; a forward hook on each target adds the term of whichever adapter the slot holds.
Switching adapters is one assignment, and an adapter that is not in the slot takes no part in anything. The term has
the bits that PEFT computes for the same adapter, also where the base model's dtype is narrower.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from everloop_trainer.about import ALPHA
from everloop_trainer.engine.errors import ContentError

Group = Literal["attn", "mlp", "unembed"]
_GROUP_OF_MODULE: dict[str, Group] = {
    "q_proj": "attn",
    "k_proj": "attn",
    "v_proj": "attn",
    "o_proj": "attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of an adapter and the seed of its initialisation."""

    rank: int
    seed: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool

    def check(self, max_rank: int) -> None:
        """Raise ContentError unless 1 <= rank <= max_rank and something is to be trained."""
        if not 1 <= self.rank <= max_rank:
            raise ContentError(f"rank: must be between 1 and {max_rank}, got {self.rank}")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise ContentError("train_mlp, train_attn, train_unembed: at least one must be true")

    def trains(self, group: Group) -> bool:
        """Return whether modules of `group` carry a term."""
        return {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}[group]


@dataclass(frozen=True, slots=True)
class Target:
    """A linear module of the base model that can carry a LoRA term."""

    name: str
    group: Group
    in_features: int
    out_features: int


def find_targets(model: nn.Module, head: nn.Module) -> tuple[Target, ...]:
    """List the target modules of `model`, sorted by name; `head` maps hidden states to logits.

    Raises ValueError if a kind of projection is missing: such an architecture would silently train less than asked.
    """
    targets = []
    for name, module in model.named_modules():
        group = "unembed" if module is head else _GROUP_OF_MODULE.get(name.rpartition(".")[2])
        if group is not None and isinstance(module, nn.Linear):
            targets.append(Target(name, group, module.in_features, module.out_features))
    found = {target.name.rpartition(".")[2] for target in targets}
    missing = sorted(set(_GROUP_OF_MODULE) - found)
    if missing or not any(target.group == "unembed" for target in targets):
        raise ValueError(f"unsupported architecture {type(model).__name__}: no module for {missing or 'the head'}")
    return tuple(sorted(targets, key=lambda target: target.name))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one factor lies in an adapter's flat vector: PEFT-style key, shape, and first element."""

    key: str
    shape: tuple[int, int]
    start: int

    @property
    def stop(self) -> int:
        """First element behind this factor."""
        return self.start + self.shape[0] * self.shape[1]


def layout(spec: LoraSpec, targets: Sequence[Target]) -> tuple[Entry, ...]:
    """Lay out the factors of an adapter: per target A (rank, in_features), then B (out_features, rank)."""
    entries = []
    start = 0
    for target in targets:
        if not spec.trains(target.group):
            continue
        prefix = f"base_model.model.{target.name}"
        for factor, shape in (("A", (spec.rank, target.in_features)), ("B", (target.out_features, spec.rank))):
            entries.append(Entry(f"{prefix}.lora_{factor}.weight", shape, start))
            start = entries[-1].stop
    return tuple(entries)


class Adapter:
    """The factors of one adapter: views of one flat float32 vector, which optimizer and storage work on.

    Attributes:
        spec: its shape.
        entries: where each factor lies.
        flat: float32 (parameters,).
        factors: module name -> (A, B), leaves that share memory with `flat`.
    """

    def __init__(self, spec: LoraSpec, targets: Sequence[Target]) -> None:
        self.spec = spec
        self.entries = layout(spec, targets)
        self.flat = torch.zeros(self.entries[-1].stop)
        self.scale = ALPHA / spec.rank
        self._exact = math.frexp(self.scale)[0] == 0.5
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        leaves = [leaf.requires_grad_() for leaf in self._views(self.flat)]
        trained = [target for target in targets if spec.trains(target.group)]
        for index, target in enumerate(trained):
            self.factors[target.name] = (leaves[2 * index], leaves[2 * index + 1])

    def initialise(self) -> None:
        """Set A to kaiming_uniform(a=sqrt(5)) from a generator per (seed, module name), and B to zero."""
        with torch.no_grad():
            for name, (a, b) in self.factors.items():
                generator = torch.Generator().manual_seed(_module_seed(self.spec.seed, name))
                nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
                b.zero_()

    def collect_gradients(self) -> torch.Tensor:
        """Return a zero vector like `flat` into which backward passes add until `release_gradients`."""
        gradients = torch.zeros_like(self.flat)
        leaves = [leaf for pair in self.factors.values() for leaf in pair]
        for leaf, view in zip(leaves, self._views(gradients), strict=True):
            leaf.grad = view
        return gradients

    def release_gradients(self) -> None:
        """Let go of the vector that `collect_gradients` returned."""
        for a, b in self.factors.values():
            a.grad = b.grad = None

    def add(self, name: str, values: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return a module's `output` (..., out_features) for `values` (..., in_features) with its term, if it has one.

        Summed in float32, and rounded to the dtype of `output` once.
        """
        if name not in self.factors:
            return output
        a, b = self.factors[name]
        low = functional.linear(values.to(a.dtype), a)
        # PEFT scales last. A power of two changes no mantissa, so it may come where there is least to multiply.
        if self._exact:
            term = functional.linear(low * self.scale, b)
        else:
            term = functional.linear(low, b) * self.scale
        return (output + term).to(output.dtype)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[entry.start : entry.stop].view(entry.shape).detach() for entry in self.entries]


class AdapterSlot:
    """Holds the adapter that takes part in the base model's forward passes; None is the base model itself."""

    def __init__(self, model: nn.Module, targets: Sequence[Target]) -> None:
        self.active: Adapter | None = None
        self._mixed: list[tuple[Adapter, torch.Tensor]] | None = None
        for target in targets:
            model.get_submodule(target.name).register_forward_hook(self._hook(target.name))

    @contextmanager
    def mixed(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Let each row of the batch have an adapter of its own, instead of `active`.

        A term is computed for all rows and kept for its own: a row's bits must not depend on how many share it.
        """
        different = {id(adapter): adapter for adapter in adapters if adapter is not None}
        self._mixed = [
            (adapter, torch.tensor([each is adapter for each in adapters])) for adapter in different.values()
        ]
        try:
            yield
        finally:
            self._mixed = None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        def add_term(_module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if self._mixed is None:
                return output if self.active is None else self.active.add(name, inputs[0], output)
            for adapter, own in self._mixed:
                if name in adapter.factors:
                    added = adapter.add(name, inputs[0], output)
                    output = torch.where(own.view(-1, *[1] * (output.ndim - 1)), added, output)
            return output

        return add_term


def _module_seed(seed: int, name: str) -> int:
    """Return 63 bits that depend on both; independent of which other modules are trained."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
