"""Every refusal of a forward_backward names its field, and leaves the accumulated gradients as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everloop_trainer.tinker_proto import tinker_public
from tests.engine.client import LORA, Engine, Refused, datum, put, request

GOOD = datum([1, 2, 3])


def _changed(change: Callable[[Any], object]) -> bytes:
    """A request whose second datum of three is spoilt by `change`."""
    message = tinker_public.ForwardBackwardRequest(data=[GOOD, GOOD, GOOD], loss_fn="cross_entropy")
    change(message.data[1])
    return bytes(message.SerializeToString())


def _image(message: Any) -> None:
    message.model_input.add().image.data = b"png"


def _odd_bytes(message: Any) -> None:
    message.model_input[0].encoded_text.tokens = b"12345"


def _sparse(crow: Sequence[int], columns: Sequence[int], shape: Sequence[int] = (3, 2)) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for name, dtype in (("target_tokens", np.int64), ("weights", np.float32)):
            tensor = message.loss_fn_inputs[name]
            tensor.sparse_csr.values = np.ones(len(columns), dtype).tobytes()
            tensor.sparse_csr.crow_indices = np.asarray(crow, np.int64).tobytes()
            tensor.sparse_csr.col_indices = np.asarray(columns, np.int64).tobytes()
            tensor.shape[:] = shape

    return change


def _policy(loss_fn: str, options: dict[str, float] | None = None, **inputs: Any) -> bytes:
    """A request of one datum for a policy gradient loss."""
    given: dict[str, Any] = {"logprobs": [-1, -1, -1], "advantages": [1, 1, 1], **inputs}
    message = datum([1, 2, 3])
    del message.loss_fn_inputs["weights"]
    for name, values in given.items():
        put(message, name, np.asarray(values, np.int64 if name == "target_tokens" else np.float32))
    whole = tinker_public.ForwardBackwardRequest(data=[message], loss_fn=loss_fn)
    for name, number in (options or {}).items():
        whole.loss_fn_config[name] = number
        whole.loss_fn_config_v2[name].number = number
    return bytes(whole.SerializeToString())


def _text() -> bytes:
    message = tinker_public.ForwardBackwardRequest(data=[GOOD], loss_fn="ppo")
    message.loss_fn_config_v2["clip_low_threshold"].text = "0.8"
    return bytes(message.SerializeToString())


def _dense(name: str, values: Any) -> Callable[[Any], None]:
    return lambda message: put(message, name, np.asarray(values))


def _floats(values: list[float]) -> Any:
    return np.asarray(values, np.float32)


def _option(value: float) -> bytes:
    message = tinker_public.ForwardBackwardRequest(data=[GOOD], loss_fn="cross_entropy")
    message.loss_fn_config_v2["beta"].number = value
    return bytes(message.SerializeToString())


CASES = {
    "no protobuf": (b"\xff\xff\xff", "body: not a ForwardBackwardRequest"),
    "loss": (request(GOOD, loss_fn="grpo"), "loss_fn: 'grpo' is not supported; supported: cross_entropy, importance_"),
    "unpublished loss": (
        request(GOOD, loss_fn="stable_reinforce"),
        "loss_fn: 'stable_reinforce' is not supported (its definition is not published); supported: cross_entropy, imp",
    ),
    "traced loss": (
        request(GOOD, loss_fn="custom"),
        "loss_fn_config.loss_id: '' is not the id that create_custom_loss",
    ),
    "option of a traced loss": (
        _policy("custom", {"beta": 1}),
        "loss_fn_config.beta: not an option of custom, which has",
    ),
    "option of another": (
        _policy("ppo", {"beta": 1}),
        "loss_fn_config.beta: not an option of ppo, which has clip_low_threshold, clip_high_threshold",
    ),
    "option that is missing": (_policy("dro"), "loss_fn_config.beta: missing; dro has no default for it"),
    "option as text": (_text(), "loss_fn_config.clip_low_threshold: must be a number"),
    "negative option": (
        _policy("dro", {"beta": -1}),
        "loss_fn_config.beta: must be a finite number from 0 on, got -1.0",
    ),
    "bounds the wrong way round": (
        _policy("ppo", {"clip_low_threshold": 1.3}),
        "loss_fn_config.clip_low_threshold: 1.3 is above clip_high_threshold 1.2",
    ),
    "nothing marked": (
        _policy("gspo", sequence_ratio_mask=[0, 0, 0]),
        "data[0].loss_fn_inputs.sequence_ratio_mask: marks no token",
    ),
    "input of another": (
        _policy("ppo", sequence_ratio_mask=[1, 1, 1]),
        "data[0].loss_fn_inputs.sequence_ratio_mask: not an input of ppo (target_tokens, logprobs, advantages)",
    ),
    "several targets for one": (
        _policy("ppo", target_tokens=np.ones((3, 2))),
        "data[0].loss_fn_inputs.target_tokens: ppo takes one target for each input token, got shape (3, 2)",
    ),
    "logprob that is none": (
        _policy("ppo", logprobs=[-1, -np.inf, -1]),
        "data[0].loss_fn_inputs.logprobs[1]: must be finite, got -inf",
    ),
    "ratio beyond float32": (_policy("importance_sampling", logprobs=[-1e9, -1, -1]), "data: the loss is not finite"),
    "option": (_option(1.0), "loss_fn_config.beta: not an option of cross_entropy"),
    "no datum": (request(), "data: must hold at least one datum"),
    "image": (_changed(_image), "data[1].model_input.chunks[1]: base model 'test' takes no images"),
    "odd bytes": (_changed(_odd_bytes), "data[1].model_input.chunks[0].tokens: 5 bytes are no int32 array"),
    "empty": (_changed(lambda message: message.ClearField("model_input")), "data[1].model_input: must hold at least"),
    "too long": (request(GOOD, datum([1] * 513)), "data[1].model_input: 513 tokens exceed the maximum of 512"),
    "token": (request(GOOD, datum([1, 320], [1, 1])), "data[1].model_input[1]: token id 320 is outside"),
    "negative token": (request(GOOD, datum([-1, 5], [1, 1])), "data[1].model_input[0]: token id -1 is outside"),
    "target": (
        request(GOOD, datum([1, 2], [2, 320])),
        "data[1].loss_fn_inputs.target_tokens[1]: token id 320 is outside the vocabulary (0 to 319)",
    ),
    "negative target": (
        request(GOOD, datum([1, 2], [-100, 2])),
        "data[1].loss_fn_inputs.target_tokens[0]: token id -100 is outside",
    ),
    "target length": (
        request(GOOD, datum([1, 2, 3], [2, 3])),
        "data[1].loss_fn_inputs.target_tokens: 2 values for 3 input tokens",
    ),
    "weights length": (
        _changed(_dense("weights", _floats([1, 1]))),
        "data[1].loss_fn_inputs.weights: 2 values for 3 input tokens",
    ),
    "infinite weight": (
        _changed(_dense("weights", _floats([1, np.inf, 1]))),
        "data[1].loss_fn_inputs.weights[1]: must be finite, got inf",
    ),
    "nan weight": (
        _changed(_dense("weights", _floats([1, 1, np.nan]))),
        "data[1].loss_fn_inputs.weights[2]: must be finite, got nan",
    ),
    "no weights": (
        _changed(lambda message: message.loss_fn_inputs.pop("weights")),
        "data[1].loss_fn_inputs.weights: missing",
    ),
    "no targets": (
        _changed(lambda message: message.loss_fn_inputs.pop("target_tokens")),
        "data[1].loss_fn_inputs.target_tokens: missing",
    ),
    "unknown input": (
        _changed(_dense("mask", _floats([1, 1, 1]))),
        "data[1].loss_fn_inputs.mask: not an input of cross_entropy",
    ),
    "float targets": (
        _changed(_dense("target_tokens", _floats([1, 2, 3]))),
        "data[1].loss_fn_inputs.target_tokens: must be integers, got float32",
    ),
    "several targets and one weight": (
        _changed(_dense("target_tokens", np.ones((3, 2), np.int64))),
        "data[1].loss_fn_inputs.weights: shape (3,) differs from that of target_tokens, (3, 2)",
    ),
    "too many dimensions": (
        _changed(_dense("target_tokens", np.ones((3, 2, 1), np.int64))),
        "data[1].loss_fn_inputs.target_tokens: shape (3, 2, 1) is not supported; give (3,), or (3, K) with K up to",
    ),
    "too many targets": (
        _changed(_sparse([0, 1, 2, 3], [0, 0, 0], (3, 2**40))),
        "data[1].loss_fn_inputs.target_tokens: shape (3, 1099511627776) is not supported",
    ),
    "rows": (
        _changed(_sparse([0, 1, 2], [0, 0], (2, 2))),
        "data[1].loss_fn_inputs.target_tokens: 2 rows for 3 input tokens",
    ),
    "sparse rows": (
        _changed(_sparse([0, 2, 1, 3], [0, 1, 0])),
        "data[1].loss_fn_inputs.target_tokens.crow_indices: don't divide 3 values among 3 rows",
    ),
    "sparse columns": (
        _changed(_sparse([0, 1, 2, 3], [0, 1, 2])),
        "data[1].loss_fn_inputs.target_tokens.col_indices: must be 0 to 1",
    ),
    "sparse twice": (
        _changed(_sparse([0, 2, 2, 3], [1, 1, 0])),
        "data[1].loss_fn_inputs.target_tokens.col_indices: a row names a column twice",
    ),
    "token among several": (
        _changed(lambda message: put(message, "target_tokens", np.asarray([[1, 2], [3, 320], [1, 1]]))),
        "data[1].loss_fn_inputs.target_tokens[1][1]: token id 320 is outside",
    ),
    "dtype": (
        _changed(lambda message: setattr(message.loss_fn_inputs["weights"], "dtype", 4)),
        "data[1].loss_fn_inputs.weights: dtype 4 is not supported",
    ),
    "bytes of a tensor": (
        _changed(lambda message: setattr(message.loss_fn_inputs["weights"], "dense", b"12345")),
        "data[1].loss_fn_inputs.weights: 5 bytes are no float32 array",
    ),
    "infinite loss": (request(GOOD, datum([1, 2], [2, 3], [3e38, 3e38])), "data: the loss is not finite"),
    "infinite gradient": (request(GOOD, datum([1, 2], [2, 3], [1e37, 1e37])), "data: the gradient is not finite"),
}


@pytest.fixture(scope="module")
def engine(tiny_spare: Path) -> Any:
    """An engine with a model that has gradients outstanding."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.step("m", 1, request(GOOD))
        engine.call("forward_backward", request(GOOD), model="m", seq=3, forward_only=False)
        yield engine


@pytest.mark.parametrize("case", CASES)
def test_refusal_names_the_field_and_changes_nothing(engine: Engine, case: str, tmp_path: Path) -> None:
    """A spoilt request is the user's fault, says where, and weights, moments and gradients keep their bits."""
    body, message = CASES[case]
    before = engine.saved("m", tmp_path / "before")
    with pytest.raises(Refused) as refusal:
        engine.call("forward_backward", body, model="m", seq=4, forward_only=False)
    assert str(refusal.value).startswith(message)
    assert refusal.value.category == "user"
    assert engine.saved("m", tmp_path / "after") == before


def test_what_the_sdk_may_send_is_accepted(engine: Engine) -> None:
    """Several text chunks, int64 weights, negative weights and a shape left out are all fine."""
    message = tinker_public.Datum()
    for tokens in ([1, 2], [3]):
        message.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    put(message, "target_tokens", np.asarray([2, 3, 4]))
    put(message, "weights", np.asarray([0, -1, 1]))
    del message.loss_fn_inputs["weights"].shape[:]
    _, body = engine.call("forward_backward", request(message), model="m", seq=4, forward_only=True)
    assert (
        body
        == engine.call(
            "forward_backward", request(datum([1, 2, 3], [2, 3, 4], [0, -1, 1])), model="m", seq=5, forward_only=True
        )[1]
    )
