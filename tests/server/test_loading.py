"""A user's new process goes on from a checkpoint that an old one saved, as if it had never ended. Kills in a load."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import LoadWeights
from everloop_trainer.session.records import Accept, Result, Try
from tests.networks import new_address
from tests.server.pod import Pod, alive, eventually, kill_process, process_of
from tests.server.sdk import SdkProgram, run_command
from tests.server.stub import Stub, serving
from tests.server.test_survival import adapter, assert_equal_states, history, model_of

STEPS, HALF = 6, 3
LOOP = {"steps": STEPS, "sequences": 8, "length": 40}


@dataclass(frozen=True)
class Saved:
    """A loop that was not interrupted: its model, losses by step, and its two checkpoints halfway."""

    model: str
    losses: list[float]
    path: str
    sampler_path: str


@pytest.fixture(scope="module")
def saved(own_pod: Pod, gateway: Stub) -> Saved:
    """The old process, which saves halfway and goes on to the end."""
    with SdkProgram(gateway.url, "train", seed=17, save_after=HALF, **LOOP) as program:
        program.finish()
    half, thin = (event["path"] for event in program.named("half"))
    return Saved(model_of(program), [event["loss"] for event in program.named("step")], half, thin)


def resume(gateway: Stub, path: str, *, optimizer: bool) -> SdkProgram:
    """The new process."""
    return SdkProgram(gateway.url, "resume", path=path, optimizer=optimizer, start=HALF, **LOOP)


def assert_went_on(pod: Pod, program: SdkProgram, saved: Saved) -> None:
    """Losses and final state, optimizer included, are those of the loop that was never interrupted."""
    program.finish()
    (created,) = program.named("created")
    assert created["rank"] == 8
    assert [event["loss"] for event in program.named("step")] == saved.losses[HALF:]
    (again,) = program.named("again")
    assert again == {"event": "again", "path": saved.path, "loss": saved.losses[HALF]}
    assert_equal_states(adapter(pod, created["model_id"]), adapter(pod, saved.model))
    status = pod.status()
    assert status is not None
    assert status["replayMismatches"] == 0
    assert not status["storage"]["error"]


def test_with_optimizer_it_goes_on_as_if_nothing_had_happened(own_pod: Pod, gateway: Stub, saved: Saved) -> None:
    """create_training_client_from_state_with_optimizer in another process: bit-equal to going on without a break."""
    with resume(gateway, saved.path, optimizer=True) as program:
        assert_went_on(own_pod, program, saved)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_without_optimizer_the_weights_are_the_same(own_pod: Pod, gateway: Stub, saved: Saved, kind: str) -> None:
    """create_training_client_from_state: the first loss is the same, the steps after it are a fresh optimizer's."""
    path = saved.path if kind == "weights" else saved.sampler_path
    with SdkProgram(gateway.url, "resume", path=path, optimizer=False, start=HALF, **LOOP) as program:
        eventually(lambda: len(program.named("step")) == STEPS - HALF, "the steps", 60)
    losses = [event["loss"] for event in program.named("step")]
    assert losses[0] == saved.losses[HALF]
    assert losses[1] != saved.losses[HALF + 1]


@pytest.mark.parametrize("name", ["missing", "half"])
def test_what_cannot_be_loaded_is_a_users_error(gateway: Stub, saved: Saved, name: str) -> None:
    """An unknown name, and an optimizer that a sampler's checkpoint has not: the message names the path."""
    path = f"tinker://{saved.model}/{'weights' if name == 'missing' else 'sampler_weights'}/{name}"
    with resume(gateway, path, optimizer=True) as program:
        program.finish()
    (refused,) = program.named("refused")
    assert refused["category"] == "user"
    assert "path: " in refused["message"]
    assert path in refused["message"]


def loading(pod: Pod) -> tuple[str, int] | None:
    """Model and engine of a load_weights that was tried and has no result."""
    loads, found = set(), None
    for record in history(pod):
        if isinstance(record, Accept) and isinstance(record.args, LoadWeights):
            loads.add((record.stream, record.seq))
        elif isinstance(record, Try) and (record.stream, record.seq) in loads:
            found = record.stream, record.engine
        elif isinstance(record, Result) and (record.stream, record.seq) in loads:
            found = None
    return found


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_killed_in_the_load(own_pod: Pod, gateway: Stub, saved: Saved, victim: str) -> None:
    """SIGKILL after the load was tried and before it ended, as the journal proves: the user's process sees nothing."""
    status = own_pod.status()
    assert status is not None
    engine = status["engine"]["pid"]
    os.kill(engine, signal.SIGSTOP)
    with resume(gateway, saved.path, optimizer=True) as program:
        model, tried = eventually(lambda: loading(own_pod), "the load runs", 60)
        assert tried == engine
        if victim == "engine":
            kill_process(engine)
        else:
            kill_process(process_of(own_pod, "server"))
            os.kill(engine, signal.SIGCONT)
            eventually(lambda: not alive(engine), "the engine ended with its server", 5)
        assert_went_on(own_pod, program, saved)
    of_load = [record for record in own_pod.journal() if record.get("s") == model and record["n"] == 0]
    assert [record["t"] for record in of_load if record["t"] != "fetched"] == ["accept", "try", "try", "result"]
    first, second = (record for record in of_load if record["t"] == "try")
    assert (first["incarnation"] == second["incarnation"]) is (victim == "engine")


def test_a_loaded_model_outlives_its_source(own_pod: Pod, gateway: Stub, saved: Saved) -> None:
    """Once the load has ended, neither a killed engine nor a killed server reads the source again: it may be gone."""
    with SdkProgram(gateway.url, "train", seed=18, save_after=1, steps=1, sequences=8, length=40) as source:
        source.finish()
    path = source.named("half")[0]["path"]
    with SdkProgram(gateway.url, "resume", path=path, optimizer=True, start=1, **LOOP | {"steps": 40}) as program:
        model = model_of(program)
        directory = own_pod.root / "models" / storage_id(model_of(source)) / "checkpoints" / "weights"
        for file in directory.glob("*/state.safetensors"):
            file.unlink()
        for victim in ("engine", "server"):
            before = len(program.named("step"))
            eventually(lambda: len(program.named("step")) > before, "a step", 60)  # noqa: B023
            status = own_pod.status()
            assert status is not None
            kill_process(status["engine"]["pid"] if victim == "engine" else process_of(own_pod, "server"))
            after = len(program.named("step"))
            eventually(lambda: len(program.named("step")) > after + 1, "steps after the kill", 60)  # noqa: B023
    status = own_pod.status()
    assert status is not None
    assert not status["storage"]["error"]
    assert any(item["modelId"] == model for item in status["models"])


def test_the_sdks_command_line_lists_checkpoints(own_pod: Pod, gateway: Stub, saved: Saved) -> None:
    """`tinker checkpoint list` and `info`, with sizes, newest first; what nobody saved is not found."""
    listed = run_command(gateway.url, "checkpoint", "list", "--run-id", saved.model)["checkpoints"]
    assert [(one["checkpoint_id"], one["checkpoint_type"]) for one in listed] == [
        ("weights/final", "training"),
        ("sampler_weights/half", "sampler"),
        ("weights/half", "training"),
    ]
    assert listed[2]["tinker_path"] == saved.path
    directory = own_pod.root / "models" / storage_id(saved.model) / "checkpoints" / "weights"
    assert listed[2]["size_bytes"] in {file.stat().st_size for file in directory.glob("*/state.safetensors")}
    info = run_command(gateway.url, "checkpoint", "info", saved.path)
    assert (info["tinker_path"], info["lora_rank"]) == (saved.path, 8)
    weights = own_pod.post("/api/v1/weights_info", {"tinker_path": saved.path}).json()
    assert (weights["base_model"], weights["lora_rank"], weights["train_mlp"]) == ("everloop/tiny-llama", 8, True)
    missing = own_pod.post("/api/v1/weights_info", {"tinker_path": f"{saved.path}-not"})
    assert (missing.status_code, "tinker_path" in missing.json()["detail"]) == (404, True)
    assert own_pod.get("/api/v1/training_runs/nobody").status_code == 404


def test_a_killed_loop_goes_on_from_an_automatic_checkpoint(make_pod: Callable[..., Pod]) -> None:
    """The user's process is killed and has saved nothing: another finds `auto-<step>` and goes on as it would have."""
    pod = make_pod()
    pod.configure(checkpoints={"everySeconds": 0.2, "keepLast": 2})
    pod.start()
    pod.wait_until("Serving")
    with serving(pod, new_address(), {}) as stub:
        with SdkProgram(stub.url, "train", seed=17, **LOOP | {"steps": 1000}) as program:
            model = model_of(program)

            def newest() -> int:
                found = run_command(stub.url, "checkpoint", "list", "--run-id", model)["checkpoints"]
                return int(found[0]["checkpoint_id"].removeprefix("weights/auto-")) if found else 0

            step = eventually(newest, "an automatic checkpoint", 60)
            reached = len(program.named("step"))
            eventually(lambda: len(program.named("step")) > max(reached, step) + 4, "steps after it", 60)
            program.process.kill()
            program.process.wait()
            losses = [event["loss"] for event in program.named("step")]
        step = newest()
        path = f"tinker://{model}/weights/auto-{step}"
        going_on = LOOP | {"steps": step + 3}
        with SdkProgram(stub.url, "resume", path=path, optimizer=True, start=step, **going_on) as program:
            program.finish()
        resumed = [event["loss"] for event in program.named("step")]
        with SdkProgram(stub.url, "train", seed=17, **going_on) as program:
            program.finish()
    assert resumed == [event["loss"] for event in program.named("step")][step:]
    told = losses[:step]  # it may have been killed before it told of the last of these steps
    assert told == [event["loss"] for event in program.named("step")][: len(told)]
