"""What a session must answer and end with, by its contract alone: each model's numbers, one after another.

There is no journal here, no engine, no time and no fault. Where the contract leaves an answer open, because a client
cannot know in which order two things came about, what the client observed is taken.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from everloop_trainer.session import operations as ops
from everloop_trainer.session.outcomes import JSON, PROTOBUF, Succeeded
from everloop_trainer.session.ports import Lora
from tests.session.calls import Call, saved_as
from tests.session.fake_engine import Adapter, sampled

CHANGING = {"forward_backward", "optim_step", "load_weights"}
Expected = Succeeded | str
"""A result byte for byte, or the category of a failure."""


class _Fails(Exception):
    """The operation fails, and with `gap` its accumulation window lacks it."""

    def __init__(self, category: str = "user", *, gap: bool = False) -> None:
        self.category, self.gap = category, gap


@dataclass
class _Save:
    call: Call
    content: bytes
    lora: Lora


@dataclass
class _Model:
    adapter: Adapter
    lora: Lora
    gaps: list[Call] = field(default_factory=list)
    parts: list[Call] = field(default_factory=list)


class Sequential:
    """Runs every call: `expected` has each one's outcome by its request, `models` what they end as."""

    def __init__(self, calls: dict[str, Call], max_rank: int) -> None:
        self._calls, self._max_rank = calls, max_rank
        self._next: dict[str, int] = {}
        self._saves: dict[str, list[_Save]] = {}
        self.models: dict[str, _Model] = {}
        self.expected: dict[str, Expected] = {}
        for request, call in calls.items():
            if isinstance(call.operation.args, ops.Sample):
                self.expected[request] = self._sample(call, call.operation.args)
            else:
                self._advance(call.operation.stream, call.operation.seq)

    def _advance(self, stream: str, last: int) -> None:
        while (seq := self._next.get(stream, 0)) <= last:
            self._next[stream] = seq + 1
            call = self._calls[f"{stream}:{seq}"]
            try:
                self.expected[f"{stream}:{seq}"] = self._run(call, call.operation, self.models.get(stream))
            except _Fails as fails:
                self.expected[f"{stream}:{seq}"] = fails.category
                if fails.gap and stream in self.models:
                    self.models[stream].gaps.append(call)

    def _run(self, call: Call, operation: ops.Operation, model: _Model | None) -> Expected:
        args = operation.args
        if call.given_up or isinstance(args, ops.Refused):
            raise _Fails(gap=call.kind in CHANGING)
        if isinstance(args, ops.CreateModel):
            if args.rank > self._max_rank:
                raise _Fails
            lora = Lora(args.rank, args.seed or 0, args.train_mlp, args.train_attn, args.train_unembed)
            self.models[operation.stream] = _Model(Adapter.fresh(lora), lora)
            return _json({"model_id": operation.stream, "type": args.KIND})
        if isinstance(args, ops.LoadWeights) and (model is not None or operation.seq == 0):
            return self._load(call, args, model)
        if model is None:
            raise _Fails
        if isinstance(args, ops.ForwardBackward):
            return _forward_backward(model, call, args.forward_only)
        if isinstance(args, ops.OptimStep):
            return _optim_step(model, call, args)
        return self._save(call, args, model)

    def _save(self, call: Call, args: ops.Arguments, model: _Model) -> Expected:
        path = saved_as(call.operation)
        assert path is not None
        if path in self._saves and not (isinstance(args, ops.SaveWeights) and args.overwrite):
            raise _Fails
        adapter = dataclasses.replace(model.adapter, seq=call.operation.seq)
        content = adapter.dump() if isinstance(args, ops.SaveWeights) else str(adapter.weights).encode()
        self._saves.setdefault(path, []).append(_Save(call, content, model.lora))
        return _json({"path" if path.startswith("tinker:") else "sampling_session_id": path, "type": args.KIND})

    def _found(self, path: str, call: Call) -> _Save | None:
        """What that path of another stream meant when the call was accepted: the newest save that had ended by then."""
        ended = [
            made
            for made in self._calls.values()
            if saved_as(made.operation) == path
            and (made.told < call.sent or (made.sent < call.acknowledged and isinstance(call.outcome, Succeeded)))
        ]
        for made in ended:
            self._advance(made.operation.stream, made.operation.seq)
        return next((save for save in reversed(self._saves.get(path, [])) if save.call in ended), None)

    def _load(self, call: Call, args: ops.LoadWeights, model: _Model | None) -> Expected:
        own = args.path.startswith(f"tinker://{call.operation.stream}/")
        save = self._saves[args.path][-1] if own and args.path in self._saves else None
        save = save if own else self._found(args.path, call)
        if save is None or (args.optimizer and "/weights/" not in args.path):
            raise _Fails(gap=True)
        if model is not None and dataclasses.replace(model.lora, seed=save.lora.seed) != save.lora:
            raise _Fails(gap=True)
        data = json.loads(save.content)
        saved = Adapter(dataclasses.asdict(save.lora), data) if isinstance(data, int) else Adapter(**data)
        loaded = dataclasses.replace(saved.begun(optimizer=args.optimizer), seq=call.operation.seq)
        self.models[call.operation.stream] = _Model(loaded, save.lora)
        return _json({"path": args.path, "model_id": call.operation.stream, "type": args.KIND})

    def _sample(self, call: Call, args: ops.Sample) -> Expected:
        path = call.operation.stream if args.weights == ops.WEIGHTS_OF_SAMPLER else args.weights
        save = None if path is None else self._found(path, call)
        if path is not None and save is None:
            return "user"
        return Succeeded(PROTOBUF, sampled(b"base" if save is None else save.content, args))


def _forward_backward(model: _Model, call: Call, forward_only: bool) -> Expected:
    adapter, operation = model.adapter, call.operation
    if operation.body.startswith((b"bad", b"poison")):
        raise _Fails("user" if operation.body.startswith(b"bad") else "server", gap=not forward_only)
    gradient = adapter.gradient(operation.body)
    if not forward_only:
        adapter.gradients.append(gradient)
        adapter.seq = operation.seq
        model.parts.append(call)
    return Succeeded(PROTOBUF, b"loss %d" % gradient)


def _optim_step(model: _Model, call: Call, args: ops.OptimStep) -> Expected:
    """Fails with its window if it, or what it applies, was sent before the client was told of what the window lacks."""
    # A part that had ended before the failed operation was sent belongs to another call.
    beside = [
        (gap, part)
        for gap in model.gaps
        for part in (model.parts if gap.kind == "forward_backward" else ())
        if gap.given_up or part.told > gap.sent
    ]
    certain = any(gap.asked > call.acknowledged for gap in model.gaps) or any(
        gap.asked > part.acknowledged and (gap.given_up or gap.acknowledged < part.sent) for gap, part in beside
    )
    possible = any(gap.told > call.sent for gap in model.gaps) or any(gap.told > part.sent for gap, part in beside)
    fails = certain or (possible and call.says("accumulation window"))
    if not fails and args.learning_rate < 0:
        raise _Fails(gap=True)
    model.adapter.seq = call.operation.seq
    model.gaps.clear()
    model.parts.clear()
    if fails:
        model.adapter.gradients.clear()
        raise _Fails
    return _json({"metrics": model.adapter.apply(call.operation.seq, args.learning_rate), "type": args.KIND})


def _json(answer: dict[str, object]) -> Succeeded:
    return Succeeded(JSON, json.dumps(answer, separators=(",", ":")).encode())
