"""Traced losses: what the SDK sends gives what the SDK itself computes, and nothing that is sent does harm."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, run_loss_handle, trace_loss
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from everloop_losses import identity
from everloop_losses.graph import GraphError, TracedLoss, read
from everloop_losses.operations import ATTRIBUTES, FUNCTIONS, METHODS
from everloop_trainer.engine import training
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import parse_request
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.inputs import Limits
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.traced import Evaluation, Told
from tests.engine.models import VOCABULARY
from tests.engine.reference import randomise
from tests.engine.traced_losses import LOSSES, clipped_ratio, neg_ll

SESSION = "s-0123456789abcdef-0123456789abcdef"
MODEL = f"{SESSION}:train:0"
LENGTHS = (5, 40, 2, 17)


def traced(name: str) -> LossHandle:
    loss, ranks = LOSSES[name]
    return trace_loss(loss, ranks, SESSION)


def request(handle: LossHandle) -> dict[str, Any]:
    """As the SDK sends it."""
    body = types.CreateCustomLossRequest(
        session_id=SESSION,
        custom_loss_seq_id=0,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    dumped: dict[str, Any] = body.model_dump(mode="json", exclude_none=True)
    return dumped


def data(handle: LossHandle) -> list[tinker.Datum]:
    """Texts with random values in the place of each input."""
    generator = np.random.default_rng(5)
    made = []
    for length in LENGTHS:
        shapes = {0: (), 1: (length,), 2: (length, 3)}
        inputs: dict[str, Any] = {
            each.name: types.TensorData.from_numpy(np.asarray(generator.normal(size=shapes[each.rank]), np.float32))
            for each in handle.inputs[1:]
        }
        targets = generator.integers(0, VOCABULARY, shapes[handle.inputs[0].rank])
        inputs["target_tokens"] = types.TensorData.from_numpy(targets)
        tokens = types.ModelInput.from_ints(generator.integers(0, VOCABULARY, length).tolist())
        made.append(tinker.Datum(tokens, inputs))
    return made


def message(texts: list[tinker.Datum], loss_fn: str, **config: Any) -> bytes:
    inner = types.ForwardBackwardInput(data=texts, loss_fn=loss_fn, loss_fn_config=config or None)
    asked = types.ForwardBackwardRequest(forward_backward_input=inner, model_id=MODEL, seq_id=1)
    return bytes(forward_backward_request_to_proto(asked).SerializeToString())


def weighted(texts: list[tinker.Datum], weights: list[torch.Tensor]) -> bytes:
    """The client's part of a custom loss."""
    plain = [
        tinker.Datum(
            each.model_input,
            {"target_tokens": each.loss_fn_inputs["target_tokens"], "weights": types.TensorData.from_torch(weight)},
        )
        for each, weight in zip(texts, weights, strict=True)
    ]
    return message(plain, "cross_entropy")


@pytest.fixture(scope="module")
def adapter(tiny_base: BaseModel) -> Adapter:
    adapter = Adapter(LoraSpec(4, 5, train_mlp=True, train_attn=True, train_unembed=True), tiny_base.targets)
    adapter.initialise()
    randomise(adapter)
    return adapter


def run(base: BaseModel, adapter: Adapter, body: bytes) -> tuple[types.ForwardBackwardOutput, torch.Tensor]:
    batch = parse_request(body, Limits(VOCABULARY, 512))
    outcome, gradients = training.forward_backward(base, adapter, batch, 64)
    return deserialize_forward_backward_output(outcome.to_proto()), gradients


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_gives_what_it_gives_in_the_client(tiny_base: BaseModel, adapter: Adapter, name: str) -> None:
    """Bit-equal gradients and metrics. The client takes a pass for log-probabilities, its slope, and a second pass."""
    handle = traced(name)
    texts = data(handle)
    loss_id = identity.loss_id(SESSION, request(handle))
    found, gradients = run(tiny_base, adapter, message(texts, "custom", loss_id=loss_id))

    nothing = [torch.zeros(each.loss_fn_inputs["target_tokens"].shape or ()) for each in texts]
    first, _ = run(tiny_base, adapter, weighted(texts, nothing))
    logprobs = [each["logprobs"].to_torch().requires_grad_() for each in first.loss_fn_outputs]
    loss, metrics = run_loss_handle(handle, texts, logprobs)
    slopes = torch.autograd.grad(loss, logprobs)
    _, expected = run(tiny_base, adapter, weighted(texts, [-slope for slope in slopes]))

    assert torch.equal(gradients, expected)
    assert gradients.abs().max() > 0
    assert found.metrics.pop("loss:sum") == pytest.approx(loss.item(), rel=1e-6)
    assert found.metrics == metrics
    for ours, theirs in zip(found.loss_fn_outputs, first.loss_fn_outputs, strict=True):
        assert ours["logprobs"].data == theirs["logprobs"].data


def test_an_id_holds_its_loss() -> None:
    """The same for the same request, and a body that differs in the order of its keys is the same request."""
    body = request(traced("indexed"))
    found = identity.loss_id(SESSION, body)
    assert identity.loss_id(SESSION, dict(reversed(body.items()))) == found
    assert identity.session_of(found) == SESSION
    assert identity.unpack(found) == read(body["name"], body["inputs"], body["graph"])


def _used_by_another(loss_id: str) -> str:
    return loss_id.replace("s-0", "s-1")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda text: "mine", r"'mine' is not the id that create_custom_loss gives"),
        (lambda text: "", r"'' is not the id"),
        (_used_by_another, r"the loss was made in session 's-1.*', this model in 's-0"),
        (lambda text: text[:-9], r"was not made by create_custom_loss"),
        (lambda text: text + "!", r"was not made by create_custom_loss"),
        (lambda text: text.partition(":loss:")[0] + ":loss:AAAA", r"was not made by create_custom_loss"),
    ],
)
def test_an_id_that_is_none(change: Callable[[str], str], refusal: str) -> None:
    """Unknown, damaged, or of another session: refused by field."""
    handle = traced("neg_ll")
    loss_id = change(identity.loss_id(SESSION, request(handle)))
    with pytest.raises(ContentError, match=rf"^loss_fn_config\.loss_id: .*{refusal}"):
        parse_request(message(data(handle), "custom", loss_id=loss_id), Limits(VOCABULARY, 512))


def test_what_a_datum_lacks() -> None:
    """An input, or its rank; the SDK checks both first, other clients may not."""
    handle = traced("penalised")
    texts = data(handle)
    body = identity.loss_id(SESSION, request(handle))
    good = texts[1].loss_fn_inputs
    for key, value, refusal in (
        ("beta", None, r"beta: missing; loss 'penalised' needs it"),
        ("target_tokens", None, r"target_tokens: missing"),
        (
            "beta",
            types.TensorData.from_numpy(np.ones(2, np.float32)),
            r"beta: shape \(2,\) has rank 1, .* takes rank 0",
        ),
        ("old", types.TensorData.from_numpy(np.ones((40, 2), np.float32)), r"old: shape \(40, 2\) has rank 2"),
        ("target_tokens", types.TensorData.from_numpy(np.ones((40, 2), np.int64)), r"target_tokens: has rank 2, but"),
    ):
        inputs = {name: each for name, each in {**good, key: value}.items() if each is not None}
        changed = [texts[0], tinker.Datum(texts[1].model_input, inputs)]
        with pytest.raises(ContentError, match=rf"^data\[1\]\.loss_fn_inputs\.{refusal}"):
            parse_request(message(changed, "custom", loss_id=body), Limits(VOCABULARY, 512))


def nodes(*calls: dict[str, Any], result: str = "x", inputs: int = 1) -> dict[str, Any]:
    """A request whose graph has these calls; `logprobs` and `weights` are its inputs."""
    names = ["logprobs", "weights"][:inputs]
    placeholders = [{"op": "placeholder", "name": name, "target": name} for name in names]
    output = {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": result}, {"dict": {}}]}],
    }
    return {
        "name": "made",
        "inputs": [{"name": name, "rank": 1} for name in names],
        "graph": {"format": 1, "nodes": [*placeholders, *calls, output]},
    }


def call(target: str, *args: Any, name: str = "x", op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def loss_of(body: dict[str, Any]) -> TracedLoss:
    return read(body["name"], body["inputs"], body["graph"])


P = {"ref": "logprobs"}
SUM = call("torch.sum", P)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (nodes(call("torch.rand_like", P)), r"graph.nodes\[1\] \(x\): function torch.rand_like is not one that"),
        (nodes(call("os.system", "ls")), r"\(x\): function os.system is not one that"),
        (nodes(call("exp_", P, op="call_method")), r"\(x\): method exp_ is not one that"),
        (nodes(call("__class__", P, op="call_method")), r"\(x\): method __class__ is not one that"),
        (nodes(call("sum", 3, op="call_method")), r"nodes\[1\].args\[0\]: must be the tensor"),
        (nodes(call("getattr", P, "__class__")), r"\(x\): attribute '__class__' is none that can be read"),
        (nodes(call("getattr", P, ["shape"])), r"\(x\): attribute a list is none"),
        (
            nodes(call("net", P, op="call_module")),
            r"nodes\[1\].op: 'call_module' is not accepted here: a loss may call",
        ),
        (nodes(call("weight", op="get_attr")), r"nodes\[1\].op: 'get_attr' is not accepted here: a loss may read only"),
        (nodes(call("torch.sum", {"ref": "y"})), r"nodes\[1\].args\[0\].'ref': 'y' is no earlier node"),
        (nodes(call("torch.sum", {"ref": "x"})), r"'x' is no earlier node"),
        (nodes(SUM, SUM), r"nodes\[2\].name: 'x' is given twice"),
        (nodes(call("torch.sum", P, out=P)), r"kwargs.'out': a loss writes nowhere"),
        (nodes(call("torch.zeros_like", P, device={"device": "cuda"})), r"'device'.'device': 'cuda' is no argument"),
        (nodes(call("to", P, "cuda", op="call_method")), r"args\[1\]: text 'cuda' is taken as"),
        (nodes(call("torch.sum", P, dtype={"dtype": "complex64"})), r"'complex64' is no argument"),
        (nodes(call("torch.mul", P, 2**63)), r"args\[1\]: must fit 64 bits"),
        (nodes(call("torch.mul", P, math.inf)), r"args\[1\]: must be finite"),
        (nodes(call("torch.cat", [[[[[[[[[[P]]]]]]]]]])), r"is nested too deeply"),
        (nodes(SUM, result="logprob"), r"'logprob' is no earlier node"),
        (nodes() | {"inputs": []}, r"inputs\[0\]: must be logprobs"),
        (nodes() | {"inputs": [{"name": "logprobs", "rank": 3}]}, r"inputs\[0\].rank: must be 0, 1 or 2, got 3"),
        (nodes() | {"inputs": [{"name": "logprobs", "rank": True}]}, r"inputs\[0\].rank: must be"),
        (nodes() | {"graph": {"format": 2, "nodes": []}}, r"graph.format: must be 1, got 2"),
        (nodes() | {"graph": {"nodes": [P]}}, r"graph.nodes: 1 inputs and an output are needed"),
        (nodes() | {"graph": {"nodes": [{**P, "op": "placeholder"}] * 2}}, r"graph.nodes\[0\].'ref': is not known"),
        (nodes(*[SUM] * 1000), r"graph.nodes: 1002 are more than 1000"),
        (nodes() | {"name": "a\ud800"}, r"name: must be a text"),
    ],
)
def test_a_graph_that_is_refused_when_it_is_created(body: dict[str, Any], refusal: str) -> None:
    """By the node and the operation."""
    with pytest.raises(GraphError, match=refusal):
        identity.loss_id(SESSION, body)


def evaluate(body: dict[str, Any], length: int = 4) -> Told:
    loss = loss_of(body)
    inputs = [np.arange(length, dtype=np.float32)] * (len(loss.inputs) - 1)
    return Evaluation(loss).run("data[0]", -torch.ones(length), inputs)


HUGE = 2**40


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (nodes(call("expand", P, HUGE, 4, op="call_method")), r"node 'x' \(expand\): \d+ values are more than is left"),
        (nodes(call("new_zeros", P, {"tuple": [HUGE]}, op="call_method")), r"\(new_zeros\): \d+ values are more"),
        (
            nodes(call("new_zeros", P, {"tuple": [HUGE]}, op="call_method", device={"device": "cpu"})),
            r"\(new_zeros\): \d+ values are more",
        ),
        (
            nodes(
                call("getattr", P, "device", name="d"),
                call("new_zeros", P, HUGE, op="call_method", device={"ref": "d"}),
            ),
            r"\(new_zeros\): \d+ values are more",
        ),
        (nodes(call("torch.nn.functional.pad", P, [0, HUGE])), r"pad\): \d+ values are more"),
        (nodes(call("repeat", P, 2**62, 2**62, op="call_method")), r"node 'x' \(repeat\): "),
        (
            nodes(call("expand", P, 2**20, 4, op="call_method", name="e"), call("torch.unbind", {"ref": "e"})),
            r"unbind\): 1048576 pieces are more than 1024",
        ),
        (nodes(call("operator.pow", 10, 10**9)), r"pow\): the power is beyond"),
        (nodes(call("operator.mul", 2**62, 2**62)), r"mul\): gives no tensor, and no number of 64 bits"),
        (nodes(call("operator.mul", [1], 10**9)), r"mul\): a list is no operand"),
        (nodes(call("operator.pow", -1.0, 0.5)), r"pow\): gives no tensor"),
        (nodes(call("operator.truediv", 1, 0)), r"truediv\): division by zero"),
        (nodes(call("torch.exp", P, P, P)), r"\(torch.exp\): "),
        (nodes(call("torch.gather", P, 0, {"ref": "weights"}), inputs=2), r"\(torch.gather\): "),
        (nodes(call("torch.reshape", P, [7])), r"reshape\): shape '\[7\]' is invalid for input of size 4"),
        (nodes(call("torch.where", P)), r"\(torch.where\): "),
        (
            nodes(
                call("torch.lt", P, 0, name="mask"),
                call("torch.sort", P, name="sorted"),
                call("getattr", {"ref": "sorted"}, "indices", name="order"),
                call("operator.getitem", P, {"tuple": [{"ref": "mask"}, {"ref": "order"}]}),
            ),
            r"getitem\): a mask must be the only tensor of an index",
        ),
        (nodes(call("torch.exp", P)), r"must be a scalar of floating point, got \(4,\)"),
        (nodes(call("torch.sum", {"ref": "weights"}), inputs=2), r"does not depend on logprobs"),
        (nodes(call("torch.count_nonzero", P)), r"must be a scalar of floating point"),
        (
            nodes(
                call("torch.sub", P, P, name="nothing"),
                call("torch.sqrt", {"ref": "nothing"}, name="root"),
                call("torch.sum", {"ref": "root"}),
            ),
            r"its gradient by logprobs is not finite",
        ),
    ],
)
def test_a_graph_that_fails_when_it_runs(body: dict[str, Any], refusal: str) -> None:
    """By the node and the operation, before memory is taken."""
    with pytest.raises(ContentError, match=rf"^data\[0\]: loss 'made'.*{refusal}"):
        evaluate(body)


def test_all_datums_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be small, and there may be many."""
    monkeypatch.setattr("everloop_trainer.engine.traced.MAX_WORK", 1000)
    evaluation = Evaluation(loss_of(nodes(SUM)))
    for index in range(15):
        evaluation.run(f"data[{index}]", -torch.ones(4), [])
    with pytest.raises(ContentError, match=r"^data\[15\]: loss 'made' takes more than 1000 values"):
        evaluation.run("data[15]", -torch.ones(4), [])


PREPARED = (
    call("torch.reshape", P, [2, 2], name="square"),
    call("torch.sigmoid", P, name="p"),
    call("long", {"ref": "p"}, op="call_method", name="whole"),
    call("torch.gt", P, 0, name="mask"),
    call("torch.cummax", P, 0, name="pair"),
    call("torch.reshape", {"ref": "square"}, [1, 2, 2], name="cube"),
)
SQUARE, PROBABILITY, WHOLE, MASK, CUBE = ({"ref": name} for name in ("square", "p", "whole", "mask", "cube"))
TRIED: list[tuple[Any, ...]] = [
    (P,),
    (P, P),
    (P, 1),
    (1.5, 2.0),
    (2.0,),
    (SQUARE, 0),
    (SQUARE, SQUARE),
    (PROBABILITY,),
    (PROBABILITY, PROBABILITY),
    (0.5,),
    (P, 0, WHOLE),
    (P, WHOLE, 0),
    (P, P, P),
    (PROBABILITY, P, 0.5),
    (MASK, P, P),
    (P, MASK, 0.0),
    (P, 0.0, 1.0),
    (MASK,),
    (MASK, MASK),
    (WHOLE, WHOLE),
    (SQUARE,),
    (SQUARE, P),
    (SQUARE, 0, 1),
    (P, 0, 0, 1),
    (P, [2, 2]),
    (P, [2, 2], 1.0),
    (P, [3, 4]),
    (SQUARE, [1, 0]),
    (SQUARE, {"ref": "half_whole"}),
    (SQUARE, P, P),
    (CUBE, CUBE),
    (SQUARE, {"ref": "half"}),
    ([P, P],),
    (P, {"dtype": "float64"}),
    ({"ref": "pair"}, 0),
]
"""Arguments with each of which some operations of the set can be called."""


@pytest.mark.filterwarnings("ignore")
def test_every_operation_can_be_called() -> None:
    """With some arguments, also where it is first called without memory."""
    start = {"slice": [None, 2, None]}
    halves = [
        call("operator.getitem", P, start, name="half"),
        call("operator.getitem", WHOLE, start, name="half_whole"),
    ]
    targets = [("call_function", each) for each in sorted(FUNCTIONS)] + [
        ("call_method", each) for each in sorted(METHODS)
    ]
    never = []
    for op, target in targets:
        tried = [(P, each) for each in sorted(ATTRIBUTES)] if target == "getattr" else TRIED
        for args in tried:
            try:
                evaluate(nodes(*PREPARED, *halves, call(target, *args, op=op, name="y"), call("torch.sum", P)))
            except (ContentError, GraphError):
                continue
            break
        else:
            never.append(target)
    assert never == []


def test_whole_numbers_end_no_process() -> None:
    """Divisions at which a processor would stop."""
    least = call("torch.full_like", P, -(2**63), dtype={"dtype": "int64"}, name="least")
    for target in ("operator.floordiv", "operator.mod", "torch.div", "torch.fmod", "torch.remainder"):
        for by in (-1, 0):
            options = {"rounding_mode": "trunc"} if target == "torch.div" else {}
            divided = call(target, {"ref": "least"}, by, name="y", **options)
            body = nodes(least, divided, call("torch.sum", P))
            with pytest.raises(ContentError, match=rf"node 'y' \({target}\): "):
                evaluate(body)
    evaluate(nodes(least, call("operator.floordiv", {"ref": "least"}, 2, name="y"), call("torch.sum", P)))


def test_the_sdk_names_operations_as_the_set_does() -> None:
    """Of the operators and functions whose names differ from those that users write."""
    handle = trace_loss(neg_ll, {"logprobs": 1, "weights": 1}, SESSION)
    assert [node.target for node in encode_graph(handle).nodes][2:4] == ["operator.mul", "sum"]
    handle = trace_loss(clipped_ratio, {"logprobs": 1, "old": 1, "advantages": 1}, SESSION)
    assert "torch.minimum" in [node.target for node in encode_graph(handle).nodes]
    assert operator.mul.__module__ == "_operator"
