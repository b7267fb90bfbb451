"""One LoRA model in training: adapter, optimizer, gradients outstanding, and number of the last operation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everloop_trainer.engine import training
from everloop_trainer.engine.adam import AdamParams, AdamState, adam_step
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import TrainingBatch
from everloop_trainer.engine.errors import ContentError, StateError
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.state import Parts, StateFile, Vector, read_state


class LoraModel:
    """State of one model. Each method either does all of its work or changes nothing."""

    def __init__(self, adapter: Adapter, optimizer: AdamState, gradients: torch.Tensor | None, seq: int) -> None:
        self._adapter = adapter
        self._optimizer = optimizer
        self._gradients = gradients
        self.seq = seq

    @classmethod
    def fresh(cls, base: BaseModel, spec: LoraSpec) -> LoraModel:
        """Make a model that has trained nothing; B = 0, so it equals the base model."""
        adapter = Adapter(spec, base.targets)
        adapter.initialise()
        return cls(adapter, _fresh_optimizer(adapter), None, 0)

    @classmethod
    def restored(cls, base: BaseModel, path: Path, spec: LoraSpec, parts: Parts) -> LoraModel:
        """Take a model up from a state file; with parts "weights" optimizer and numbers start anew.

        Raises StateError or OSError if the file does not hold an adapter like `spec`.
        """
        adapter, state = load_adapter(base, path, spec, parts)
        if parts == "weights":
            return cls(adapter, _fresh_optimizer(adapter), None, 0)
        optimizer = AdamState(
            torch.from_numpy(state.groups["adam.exp_avg"]),
            torch.from_numpy(state.groups["adam.exp_avg_sq"]),
            state.step,
        )
        gradients = torch.from_numpy(state.groups["grad"]) if "grad" in state.groups else None
        return cls(adapter, optimizer, gradients, state.seq)

    @classmethod
    def loaded(cls, base: BaseModel, path: Path, spec: LoraSpec, *, optimizer: bool) -> LoraModel:
        """Begin a model with a checkpoint's weights, and its optimizer or a fresh one; numbers start anew.

        Raises StateError or OSError if the file does not hold an adapter like `spec`, or no optimizer.
        """
        model = cls.restored(base, path, spec, "all" if optimizer else "weights")
        model._gradients = None
        model.seq = 0
        return model

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._optimizer.step

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are outstanding."""
        return self._gradients is not None

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return self._adapter.flat.numel()

    @property
    def missing_bytes(self) -> int:
        """Memory that the model will take and has not yet: its gradients, while none are outstanding."""
        return 0 if self.has_gradients else 4 * self.parameters

    def forward(self, base: BaseModel, seq: int, batch: TrainingBatch, budget: int) -> training.Outcome:
        """Compute the loss without gradient."""
        self._check_order(seq)
        base.use(self._adapter)
        outcome = training.forward(base, batch, budget)
        self.seq = seq
        return outcome

    def forward_backward(self, base: BaseModel, seq: int, batch: TrainingBatch, budget: int) -> training.Outcome:
        """Compute the loss and add its gradient to those outstanding. Raises ContentError if the sum is not finite."""
        self._check_order(seq)
        outcome, gradients = training.forward_backward(base, self._adapter, batch, budget)
        if self._gradients is not None and not torch.isfinite(gradients.add_(self._gradients)).all():
            raise ContentError("data: the gradients accumulated since the last optim_step are beyond float32")
        self._gradients = gradients
        self.seq = seq
        return outcome

    def optim_step(self, seq: int, params: AdamParams) -> dict[str, float]:
        """Apply and clear the outstanding gradients; without any, change nothing and say so."""
        self._check_order(seq)
        params.check()
        if self._gradients is None:
            metrics = {"skipped_no_gradients": 1.0}
        else:
            metrics = adam_step(self._adapter.flat, self._optimizer, self._gradients, params)
            self._gradients = None
        self.seq = seq
        return metrics

    def drop_gradients(self, seq: int) -> None:
        """Clear the outstanding gradients."""
        self._check_order(seq)
        self._gradients = None
        self.seq = seq

    def state(self, seq: int, parts: Parts, *, copy: bool) -> StateFile:
        """Return the state for a file marked with `seq`; without `copy` it is valid until the next operation only."""
        tensors = {"weights": self._adapter.flat}
        if parts == "all":
            tensors["adam.exp_avg"] = self._optimizer.exp_avg
            tensors["adam.exp_avg_sq"] = self._optimizer.exp_avg_sq
            if self._gradients is not None:
                tensors["grad"] = self._gradients
        groups: dict[str, Vector] = {name: tensor.numpy() for name, tensor in tensors.items()}
        if copy:
            groups = {name: np.copy(vector) for name, vector in groups.items()}
        return StateFile(self._adapter.spec, self._adapter.entries, seq, self.step, groups)

    def _check_order(self, seq: int) -> None:
        if seq <= self.seq:
            raise StateError(f"operation {seq} was already applied: the model is at {self.seq}")


def load_adapter(base: BaseModel, path: Path, spec: LoraSpec, parts: Parts) -> tuple[Adapter, StateFile]:
    """Read a state file into a new adapter. Raises StateError or OSError if it does not hold one like `spec`."""
    adapter = Adapter(spec, base.targets)
    state = read_state(path, adapter.entries, parts)
    if state.lora != spec:
        raise StateError(f"{path}: holds an adapter {state.lora}, expected {spec}")
    with torch.no_grad():
        adapter.flat.copy_(torch.from_numpy(state.groups["weights"]))
    return adapter, state


def _fresh_optimizer(adapter: Adapter) -> AdamState:
    return AdamState(torch.zeros_like(adapter.flat), torch.zeros_like(adapter.flat), 0)
