"""Numbered requests of every kind, good ones and bad ones, for four models and their samplers."""

from __future__ import annotations

import dataclasses
import itertools

from everloop_trainer.session.operations import CreateModel, Operation, Refused, Sample
from tests.session.world import SESSION, A, B, C, D, create, fb, freeze, load, optim, sample, save

KINDS = (
    *("fb", "fb", "fb", "fb", "optim", "optim", "optim", "forward", "bad", "bad-forward", "bad-optim"),
    *("poison", "large", "refused", "save", "pin", "freeze", "freeze-named"),
    *("load", "load", "load-weights", "load-own", "sample", "sample", "sample-path"),
)
NONE = f"tinker://{SESSION}:train:9/weights/none"


class Requests:
    """Gives out the next number of a model for whatever is wanted; `pick` chooses among what is there."""

    def __init__(self) -> None:
        self._numbers = {model: itertools.count() for model in (A, B, C, D)}
        self._samples = itertools.count()
        self._pins = [NONE]
        self._samplers: list[str] = []

    def new(self, model: str, kind: str, pick: int) -> Operation:
        if kind.startswith("sample"):
            known = self._samplers[pick % len(self._samplers)] if self._samplers else f"{SESSION}:sample:99"
            weights = self._pins[-1 - pick % len(self._pins)] if kind == "sample-path" else "sampler"
            return sample(known, next(self._samples), None if pick == 0 else weights)
        seq = next(self._numbers[model])
        if seq == 0:
            return self._begin(model, pick)
        body = f"{kind}{model}{seq}".encode()
        match kind:
            case "fb" | "bad" | "poison" | "large":
                return fb(model, seq, body)
            case "forward" | "bad-forward":
                return fb(model, seq, body, forward_only=True)
            case "optim" | "bad-optim":
                return optim(model, seq, 1e-3 * (pick + 1) if kind == "optim" else -1.0)
            case "refused":
                return Operation(model, seq, Refused(("forward_backward", "optim_step", "images")[pick % 3], "no"))
            case "save":
                return save(model, seq, f"n{pick % 2}", overwrite=pick > 5)
            case "pin":
                self._pins.append(f"tinker://{model}/weights/pin{seq}")
                return save(model, seq, f"pin{seq}")
            case "freeze-named":
                self._pins.append(f"tinker://{model}/sampler_weights/thin{pick}")
                return freeze(model, seq, None, f"thin{pick}")
            case "freeze":
                self._samplers.append(f"{SESSION}:sample:{len(self._samplers)}")
                return freeze(model, seq, len(self._samplers) - 1)
            case "load-own":
                return load(model, seq, f"tinker://{model}/weights/n{pick % 2}", optimizer=pick > 1)
            case _:
                return load(model, seq, self._pins[-1 - pick % len(self._pins)], optimizer=kind == "load")

    def _begin(self, model: str, pick: int) -> Operation:
        if model in (C, D) and len(self._pins) > 1:
            return load(model, 0, self._pins[-1 - pick % len(self._pins)], optimizer=pick > 1)
        rank = 1000 if pick == 11 else 8 if model == B else 4
        return create(model, rank, seed=pick)

    def another(self, operation: Operation) -> Operation:
        """The same number with another content."""
        args = operation.args
        if isinstance(args, Sample):
            return dataclasses.replace(operation, args=dataclasses.replace(args, seed=999))
        if isinstance(args, CreateModel):
            return create(operation.stream, 2, seed=999)
        if operation.seq == 0:
            return load(operation.stream, 0, NONE)
        return fb(operation.stream, operation.seq, b"another")
