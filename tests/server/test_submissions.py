"""From request bodies to operations: addresses are demanded, content errors become refused operations."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from everloop_trainer.server import submissions
from everloop_trainer.session.operations import (
    WEIGHTS_OF_SAMPLER,
    Arguments,
    CreateModel,
    ForwardBackward,
    OptimStep,
    PromptTargets,
    Refused,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    arguments_from_json,
    arguments_to_json,
)
from everloop_trainer.tinker_proto import tinker_public

SESSION = "s-0123456789abcdef-0123456789abcdef"
MODEL = f"{SESSION}:train:0"
SAMPLER = f"{SESSION}:sample:2"
CREATE = {"session_id": SESSION, "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 8}}
SAMPLE: dict[str, Any] = {
    "sampling_session_id": SAMPLER,
    "seq_id": 0,
    "num_samples": 2,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
    "sampling_params": {"max_tokens": 4, "seed": 9, "stop": [5, 6]},
}


def test_create_model_is_number_zero_of_its_stream() -> None:
    """The SDK's defaults of LoraConfig are filled in."""
    operation = submissions.create_model(CREATE)
    assert (operation.stream, operation.seq) == (MODEL, 0)
    assert operation.args == CreateModel("m", 8, None, train_mlp=True, train_attn=True, train_unembed=True)


def test_optim_step_fills_in_the_sdks_defaults() -> None:
    """Parameters that are absent have the values of the SDK's AdamParams."""
    operation = submissions.optim_step({"model_id": MODEL, "seq_id": 2, "adam_params": {"learning_rate": 0.5}})
    assert operation.args == OptimStep(0.5, 0.9, 0.95, 1e-12, 0.0, 0.0)


def test_forward_backward_keeps_the_body() -> None:
    """The request's bytes travel with the operation."""
    message = SimpleNamespace(model_id=MODEL, seq_id=1, forward_only=True, loss_fn="cross_entropy")
    operation = submissions.forward_backward(message, b"raw")
    assert (operation.request_id, operation.body) == (f"{MODEL}:1", b"raw")
    assert operation.args == ForwardBackward(forward_only=True, loss_fn="cross_entropy")


def test_saves_map_path_to_name() -> None:
    """Both kinds of save; one for a sampling session has no name."""
    save = submissions.save_weights({"model_id": MODEL, "seq_id": 3, "path": "n", "ttl_seconds": 3600})
    assert save.args == SaveWeights("n", 3600)
    ephemeral = submissions.save_weights_for_sampler({"model_id": MODEL, "seq_id": 4, "sampling_session_seq_id": 1})
    assert ephemeral.args == SaveWeightsForSampler(None, 1)


@pytest.mark.parametrize(
    ("word", "weights"),
    [("base", None), (None, WEIGHTS_OF_SAMPLER), ("tinker://a/sampler_weights/b", "tinker://a/sampler_weights/b")],
)
def test_sample_joins_chunks_and_takes_the_gateways_word(word: str | None, weights: str | None) -> None:
    """Prompt chunks are concatenated; weights come from the header, else from the pod's own knowledge."""
    operation = submissions.sample(SAMPLE, word)
    assert operation.args == Sample((1, 2, 3), 2, 4, 1.0, 1.0, -1, (5, 6), 9, weights)
    assert submissions.sample_sequence_ids(operation) == [f"{SAMPLER}:0:0", f"{SAMPLER}:0:1"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"seq_id": 1}, "model_id"),
        ({"model_id": "../../etc", "seq_id": 1}, "model_id"),
        ({"model_id": SAMPLER, "seq_id": 1}, "model_id"),
        ({"model_id": MODEL}, "seq_id"),
        ({"model_id": MODEL, "seq_id": 0}, "seq_id"),
        ({"model_id": MODEL, "seq_id": True}, "seq_id"),
        ({"model_id": MODEL, "seq_id": "1"}, "seq_id"),
        ({"model_id": MODEL, "seq_id": 2**63}, "seq_id"),
    ],
)
def test_a_body_without_an_address_names_no_operation(body: dict[str, Any], field: str) -> None:
    """Stream and number are demanded, and the one that is missing is named."""
    with pytest.raises(submissions.Undecodable, match=field):
        submissions.optim_step({"adam_params": {}} | body)


def test_a_model_has_a_number_that_its_id_has_room_for() -> None:
    """One more could be created and never be named again."""
    assert submissions.create_model(CREATE | {"model_seq_id": 10**18 - 1}).stream.endswith(f":{10**18 - 1}")
    for build in (submissions.create_model, lambda body: submissions.load_weights(body, None)):
        with pytest.raises(submissions.Undecodable, match="model_seq_id"):
            build(CREATE | {"model_seq_id": 10**18, "path": "p", "optimizer": True})


def test_a_refusal_is_short() -> None:
    """It repeats some of what a client wrote, and is kept in the journal."""
    operation = submissions.optim_step({"model_id": MODEL, "seq_id": 1, "optimizer_params": {"type": "x" * 10**6}})
    assert isinstance(operation.args, Refused)
    assert len(operation.args.error) < 2100


def test_a_refused_sample_repeats_little_of_what_was_sent() -> None:
    """It is journaled, as what is refused of models is."""
    chunks = [{"type": "x" * 10**6}]
    operation = submissions.sample(SAMPLE | {"prompt": {"chunks": chunks}}, "base")
    assert isinstance(operation.args, Refused)
    assert operation.args.error.startswith("prompt.chunks[0]: chunks of type 'xxx")
    assert len(operation.args.error) < 3000


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": {"rank": "many"}}, "lora_config.rank"),
        ({"lora_config": {"rank": 1, "seed": 2**64}}, "lora_config.seed"),
        ({"lora_config": {"rank": "8"}}, "lora_config.rank"),
        ({"lora_config": {"rank": True}}, "lora_config.rank"),
        ({"lora_config": {"rank": 8.0}}, "lora_config.rank"),
        ({"lora_config": {"rank": 8, "train_mlp": "yes"}}, "lora_config.train_mlp"),
        ({"base_model": "\ud800"}, "base_model"),
        ({"base_model": "x" * 5000}, "base_model"),
        ({"user_metadata": {"a": float("nan")}}, "user_metadata"),
        ({"user_metadata": {"a": "\ud800"}}, "user_metadata"),
        ({"user_metadata": json.loads('{"a":' * 300 + "1" + "}" * 300)}, "user_metadata"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type"),
    ],
)
def test_bad_creations_are_refused_under_their_number(changes: dict[str, Any], problem: str) -> None:
    """The operation keeps its address and kind, and the error names the field."""
    operation = submissions.create_model(CREATE | changes)
    assert (operation.stream, operation.seq) == (MODEL, 0)
    assert isinstance(operation.args, Refused)
    assert operation.args.operation == "create_model"
    assert problem in operation.args.error


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"path": "tinker://s:train:0/weights/b"}, "path: "),
        ({"optimizer": "yes"}, "optimizer: "),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type: "),
        ({"weights_access_token": "t"}, "weights_access_token: "),
    ],
)
def test_bad_loads_are_refused_under_their_number(changes: dict[str, Any], problem: str) -> None:
    """By field, also what only other services know."""
    path = "tinker://s:train:0/weights/a"
    body = {"model_id": MODEL, "seq_id": 3, "path": path, "optimizer": True}
    assert not isinstance(submissions.load_weights(body, path).args, Refused)
    operation = submissions.load_weights(body | changes, path)
    assert (operation.stream, operation.seq) == (MODEL, 3)
    assert isinstance(operation.args, Refused)
    assert operation.args.operation == "load_weights"
    assert operation.args.error.startswith(problem)


def test_a_loss_that_is_not_published_means_its_stand_in_where_the_platform_says_so() -> None:
    """Settled in what is journaled, so that it is what runs again; no other loss, and nothing else of it, changes."""
    given = tinker_public.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="stable_reinforce")
    given.loss_fn_config_v2["kl_coeff"].number = 0.5
    given.data.add().model_input_spans.add().sampled_tokens.sequence_id = "s"

    def settled(loss_fn: str, *, stand_ins: bool) -> tuple[Arguments, Any]:
        message = tinker_public.ForwardBackwardRequest()
        message.CopyFrom(given)
        message.loss_fn = loss_fn
        operation = submissions.forward_backward(message, message.SerializeToString(), stand_ins=stand_ins)
        return operation.args, tinker_public.ForwardBackwardRequest.FromString(operation.body)

    args, body = settled("stable_reinforce", stand_ins=True)
    assert args == ForwardBackward(forward_only=False, loss_fn="stable_reinforce_stand_in")
    assert body.loss_fn == "stable_reinforce_stand_in"
    body.loss_fn = "stable_reinforce"
    assert body == given
    for loss_fn, on in (("stable_reinforce", False), ("ppo", True)):
        args, body = settled(loss_fn, stand_ins=on)
        assert args == ForwardBackward(forward_only=False, loss_fn=loss_fn)
        assert body.loss_fn == loss_fn
    recorded = SAMPLE | {"record_stability_info": True}
    assert submissions.sample(recorded, "base", stand_ins=True) == submissions.sample(SAMPLE, "base")
    assert isinstance(submissions.sample(recorded, "base").args, Refused)


def test_scores_that_are_asked_for_reach_the_engine() -> None:
    """Each of them under its own name."""
    asked = {
        "prompt_alt_tokens_k": 5,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 2,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 4,
    }
    args = submissions.sample(SAMPLE | asked, "base").args
    assert isinstance(args, Sample)
    assert {name: getattr(args, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, PromptTargets(2, 1, (7, -1))),
        (
            {"data": [9], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [0]},
            PromptTargets(2, 1, (9,), (0, 0, 1), (0,)),
        ),
    ],
)
def test_named_tokens_reach_the_engine_in_their_layout(layout: dict[str, Any], expected: PromptTargets) -> None:
    """Dense or sparse as the SDK sent them, and the journal gives them back as they were."""
    tensor = {"data": [7, -1], "dtype": "int64", "shape": [2, 1]} | layout
    args = submissions.sample(SAMPLE | {"target_prompt_logprobs": tensor}, "base").args
    assert isinstance(args, Sample)
    assert args.target_prompt_logprobs == expected
    assert arguments_from_json(args.KIND, json.loads(json.dumps(arguments_to_json(args)))) == args


def test_a_prompt_with_images_is_kept_as_it_was_sent() -> None:
    """Chunk by chunk, in the body of the operation: nothing is decoded but the base64 of the wire."""
    image = {"type": "image", "data": base64.b64encode(b"\x89PNG...").decode(), "format": "png", "expected_tokens": 7}
    bare = {"type": "image", "data": "", "format": "jpeg"}
    chunks = [{"tokens": [1, -2]}, image, {"type": "encoded_text", "tokens": [3]}, bare]
    operation = submissions.sample(SAMPLE | {"prompt": {"chunks": chunks}}, "base")
    assert operation.args == Sample((), 2, 4, 1.0, 1.0, -1, (5, 6), 9, None, prompt_in_body=True)
    assert arguments_from_json(Sample.KIND, json.loads(json.dumps(arguments_to_json(operation.args)))) == operation.args
    first, second, third, fourth = tinker_public.Datum.FromString(operation.body).model_input
    assert first.encoded_text.tokens == bytes([1, 0, 0, 0, 254, 255, 255, 255])
    assert (second.image.data, second.image.format, second.image.expected_tokens) == (b"\x89PNG...", "png", 7)
    assert third.encoded_text.tokens == bytes([3, 0, 0, 0])
    assert (fourth.image.data, fourth.image.format) == (b"", "jpeg")
    assert not fourth.image.HasField("expected_tokens")


def _prompt(*chunks: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": {"chunks": [{"tokens": [1]}, *chunks]}}


POINTER = {"type": "image_asset_pointer", "format": "png", "location": "https://images.test/1.png"}
TENSOR = {"data": [1], "dtype": "int64", "shape": [1, 1]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        (_prompt(POINTER), "prompt.chunks[1]: chunks of type 'image_asset_pointer' are not served (nothing is fetched"),
        (_prompt({"type": "dmel", "dmel": ""}), "prompt.chunks[1]: chunks of type 'dmel' are not served, only"),
        (_prompt({"type": "image", "data": "=?", "format": "png"}), "prompt.chunks[1].data: must be text in"),
        (_prompt({"type": "image", "data": 5, "format": "png"}), "prompt.chunks[1].data: must be text in"),
        (_prompt({"type": "image", "data": "", "format": 7}), "prompt.chunks[1].format"),
        (
            _prompt({"type": "image", "data": "", "format": "png", "expected_tokens": 2**31}),
            "prompt.chunks[1].expected_tokens",
        ),
        (_prompt({"tokens": [2**31]}, {"type": "image", "data": "", "format": "png"}), "prompt.chunks[1].tokens"),
        ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, "prompt.chunks[0]"),
        ({"sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"sampling_params": {"seed": 2**64}}, "sampling_params.seed"),
        ({"sampling_params": {"seed": -(2**63) - 1}}, "sampling_params.seed"),
        ({"sampling_params": {"max_tokens": True}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop": ["a", 1]}}, "sampling_params.stop[1]"),
        ({"sampling_params": {"stop": [True]}}, "sampling_params.stop[0]"),
        ({"sampling_params": {"stop": ["\ud800"]}}, "sampling_params.stop[0]"),
        ({"prompt": {"chunks": [{"tokens": [1] * 2**20}, {"tokens": [1]}]}}, "prompt: 1048577 tokens"),
        ({"prompt_alt_tokens_k": "two"}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": TENSOR | {"dtype": "float32"}}, "target_prompt_logprobs.dtype"),
        ({"target_prompt_logprobs": TENSOR | {"shape": [1]}}, "target_prompt_logprobs.shape"),
        ({"target_prompt_logprobs": TENSOR | {"data": [2**63]}}, "target_prompt_logprobs.data[0]"),
        ({"target_prompt_logprobs": TENSOR | {"sparse_crow_indices": [0, 1]}}, "sparse_col_indices"),
        ({"record_stability_info": True}, "record_stability_info"),
    ],
)
def test_bad_samples_are_refused_under_their_number(changes: dict[str, Any], problem: str) -> None:
    """The error names the field, and no sequence ids are promised."""
    operation = submissions.sample(SAMPLE | changes, "base")
    assert isinstance(operation.args, Refused)
    assert problem in operation.args.error
    assert submissions.sample_sequence_ids(operation) == []


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "optimizer_params.type"),
        ({"adam_params": {"learning_rate": float("inf")}}, "adam_params.learning_rate: "),
        ({"adam_params": {"learning_rate": 1e30}}, "adam_params.learning_rate: must be at most 100, got 1e+30"),
        ({"adam_params": {"learning_rate": 0.1, "weight_decay": 1e3}}, "adam_params.weight_decay: times learning_rate"),
        ({"adam_params": {"eps": None}}, "adam_params.eps: must be a finite number"),
        ({"adam_params": "fast"}, "adam_params: "),
        ({}, "optim_params"),
    ],
)
def test_bad_steps_are_refused_under_their_number(params: dict[str, Any], problem: str) -> None:
    """Another optimizer, a number that is none, and no parameters at all."""
    operation = submissions.optim_step({"model_id": MODEL, "seq_id": 7} | params)
    assert isinstance(operation.args, Refused)
    assert (operation.seq, operation.args.operation) == (7, "optim_step")
    assert problem in operation.args.error


def test_a_save_needs_exactly_one_target() -> None:
    """Neither name nor sampling session, or both, is refused."""
    both = {"model_id": MODEL, "seq_id": 3, "path": "n", "sampling_session_seq_id": 0}
    for body in (both, {"model_id": MODEL, "seq_id": 3}):
        assert isinstance(submissions.save_weights_for_sampler(body).args, Refused)


AGE = "age1zvkyg2lqzraa2lnjvqej32nkuu0ues2s82hzrye869xeexvn73equnujwj"
"""A key of age's own documentation."""


@pytest.mark.parametrize(
    ("recipients", "field"),
    [
        ([], "age_encryption_recipients: must be 1 to 10"),
        ([AGE] * 11, "age_encryption_recipients: must be 1 to 10"),
        ([AGE, f"{AGE} x"], "age_encryption_recipients[1]: neither"),
        (["age1yubikey1q"], "age_encryption_recipients[0]: neither"),
        (["ssh-rsa AAAA"], "age_encryption_recipients[0]: neither"),
        (["-----BEGIN AGE ENCRYPTED FILE-----"], "age_encryption_recipients[0]: neither"),
        ("age1", "age_encryption_recipients: "),
    ],
)
def test_nobody_is_encrypted_for_by_mistake(recipients: Any, field: str) -> None:
    """A recipient that is none, too many, or none at all where some were meant: refused, and nothing is saved."""
    body = {"model_id": MODEL, "seq_id": 3, "path": "out", "age_encryption_recipients": recipients}
    args = submissions.save_weights_external(body).args
    assert isinstance(args, Refused)
    assert args.operation == "save_weights_external"
    assert args.error.startswith(field)


def test_external_weights_may_be_for_everybody() -> None:
    """Without recipients, and with those that are asked for."""
    body = {"model_id": MODEL, "seq_id": 3, "path": "out", "ttl_seconds": 3600}
    assert submissions.save_weights_external(body).args == SaveWeightsExternal("out", 3600)
    sealed = submissions.save_weights_external(body | {"age_encryption_recipients": [AGE] * 10})
    assert sealed.args == SaveWeightsExternal("out", 3600, (AGE,) * 10)
