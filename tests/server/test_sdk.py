"""The unmodified SDK, in a process and environment of its own, against a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from everloop_trainer.peftfiles import CARD, CONFIG, WEIGHTS
from everloop_trainer.session.execution import CANCELLED
from everloop_trainer.session.identifiers import storage_id
from tests.server import tinymodel
from tests.server.pod import Pod, eventually
from tests.server.sdk import SdkProgram
from tests.server.stub import Stub
from tests.server.wire import Wire


def test_every_call_that_is_served(stub: Stub) -> None:
    """create, forward, forward_backward, optim_step, saves, and samples from all three kinds of sampling clients."""
    with SdkProgram(stub.url, "everything", seed=5) as program:
        program.finish()
    (created,) = program.named("created")
    assert (created["base"], created["rank"], created["lora"]) == (tinymodel.NAME, 4, True)
    (forward,) = program.named("forward")
    assert forward["lengths"] == [16, 16, 16]
    assert program.named("forward_backward")[0]["loss"] == pytest.approx(forward["loss"])
    model = created["model_id"]
    assert program.named("save_state")[0]["path"] == f"tinker://{model}/weights/one"
    assert program.named("save_weights_for_sampler")[0]["path"] == f"tinker://{model}/sampler_weights/served"
    samples = {event["sampler"]: event for event in program.named("sample")}
    assert samples["named"]["logprobs"] == [6, 6]
    assert samples["named"]["reasons"] == ["length", "length"]
    assert samples["named"]["tokens"] == samples["ephemeral"]["tokens"] != samples["base"]["tokens"]


def test_a_named_save_for_sampling_is_a_peft_adapter(stub: Stub, pod: Pod) -> None:
    """In the storage, beside its weights: what PEFT and people read; a save for one sampling client alone has none."""
    with SdkProgram(stub.url, "everything", seed=6) as program:
        program.finish()
    model = program.named("created")[0]["model_id"]
    saves = pod.root / "models" / storage_id(model) / "checkpoints" / "sampler_weights"
    manifests = {path.parent: json.loads(path.read_text()) for path in saves.glob("*/manifest.json")}
    assert {manifest["name"] for manifest in manifests.values()} == {"served", None}
    for directory, manifest in manifests.items():
        names = {path.name for path in directory.iterdir()}
        if manifest["name"] is None:
            assert names == {"state.safetensors", "manifest.json"}
            continue
        assert names == {"state.safetensors", "manifest.json", CARD, CONFIG, WEIGHTS}
        config = json.loads((directory / CONFIG).read_text())
        assert (config["base_model_name_or_path"], config["r"]) == (tinymodel.NAME, 4)
        assert f"`{model}`" in (directory / CARD).read_text()
        assert all(name.startswith("base_model.model.") for name in load_file(directory / WEIGHTS))


def test_prompts_are_scored_as_the_trainer_scores_them(stub: Stub) -> None:
    """compute_logprobs and its kin: the first token has none, the others the trainer's; the likeliest come first."""
    with SdkProgram(stub.url, "everything", seed=5) as program:
        program.finish()
    (told,) = program.named("logprobs")
    for scored in (told["computed"], told["prompt"]):
        assert scored[0] is None
        assert scored[1:] == pytest.approx(told["trained"], abs=1e-4)
    assert told["last"][:3] == [None] * 3
    assert told["last"][3:] == pytest.approx(told["trained"][2:], abs=1e-4)
    assert told["prompt_likeliest"][0] is None
    for likeliest, mine in zip(told["prompt_likeliest"][1:], told["trained"], strict=True):
        logprobs = [logprob for _, logprob in likeliest]
        assert len(logprobs) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs[0] >= mine - 1e-4
    tokens, logprobs = told["sampled"]
    for token, logprob, likeliest in zip(tokens, logprobs, told["likeliest"], strict=True):
        assert likeliest[0] == [token, pytest.approx(logprob, abs=1e-5)], "it is greedy"
        assert likeliest[1][1] <= logprob
    scores = [[logprob for _, logprob in likeliest] for likeliest in told["prompt_likeliest"][1:]]
    assert told["named"] == [pytest.approx(row, abs=1e-5) for row in scores]
    shape, crow, columns, values = told["named_row"]
    assert (shape, crow, columns) == ([4, 3], [0, 0, 0, 0, 2], [0, 2])
    assert values == pytest.approx(scores[-1][:2], abs=1e-5)
    ids, logprobs = told["alternatives"]
    assert ids == [[likeliest[0][0]] * 2 for likeliest in told["prompt_likeliest"][1:]], "it is greedy"
    assert logprobs == [pytest.approx([row[0]] * 2, abs=1e-5) for row in scores]


def test_chunks_equal_one_request_and_a_bad_one_harms_nothing(stub: Stub) -> None:
    """A bad datum in each chunk position is a RequestFailedError of the user; the good chunks beside it never count."""
    with SdkProgram(stub.url, "chunks", seed=5, sequences=5) as program:
        program.finish()
    assert program.named("chunked")[0]["outputs"] == 5
    refused = program.named("refused")
    assert [event["position"] for event in refused] == [0, 1, 2, 3, 4]
    assert {event["category"] for event in refused} == {"user"}
    for event in refused:
        assert f"data[{event['position'] % 2}].loss_fn_inputs.target_tokens" in event["message"]
    unharmed = program.named("unharmed")
    assert len(unharmed) == 5
    assert all(event["before"] == event["after"] for event in unharmed)
    (spoilt,) = program.named("spoilt")
    assert "of this accumulation window failed" in spoilt["message"]
    assert spoilt["category"] == "user"
    (after,) = program.named("next")
    assert after["after"] == after["clean"] < unharmed[0]["before"]


def test_an_abandoned_sample_is_cancelled(stub: Stub, tmp_path: Path) -> None:
    """The SDK says so, the sample ends without having been sampled, and others go on."""
    until, end = tmp_path / "cancel", tmp_path / "end"

    def running() -> str | None:
        underway = (stub.pod.status() or {}).get("underway")
        return str(underway["operation"]) if underway else None

    with SdkProgram(stub.url, "abandon", until=str(until), end=str(end)) as program:
        request = eventually(running, "a sample in the engine")
        before = len(stub.submits)
        until.touch()
        eventually(lambda: ("/api/v1/cancel_future", 200) in [each[:2] for each in stub.submits[before:]], "its end")
        end.touch()
        program.finish()
    wire = Wire(stub.pod)
    assert wire.retrieve(request).json() == {"error": CANCELLED, "category": "user"}
    for repeat, status in ((request, 200), (f"{request.rpartition(':')[0]}:1", 200), (f"{request}9", 410)):
        assert wire.post("cancel_future", {"request_id": repeat}).status_code == status
    refused = wire.post("cancel_future", {"request_id": f"{wire.model}:1"})
    assert (refused.status_code, refused.json()["detail"]) == (
        400,
        "request_id: only samples can be cancelled, not an operation of a model",
    )
    wire.client.close()
    assert [len(event["tokens"]) for event in program.named("sampled")] == [2]


def test_refusals_name_the_field(stub: Stub) -> None:
    """Bad content ends as the SDK's RequestFailedError of category user; good content works after it."""
    with SdkProgram(stub.url, "refusals") as program:
        program.finish()
    refused = {event["name"]: event for event in program.named("refused")}
    assert {event["category"] for event in refused.values()} == {"user"}
    fields = {
        "rank": "lora_config.rank",
        "base_model": "base_model",
        "loss": "loss_fn",
        "name": "path",
        "again": "already exists",
        "max_tokens": "max_tokens",
        "token": "prompt",
        "topk": "topk_prompt_logprobs",
    }
    assert refused.keys() == fields.keys()
    for name, field in fields.items():
        assert field in refused[name]["message"], name
    assert {event["name"] for event in program.named("accepted")} == {"save", "good"}
