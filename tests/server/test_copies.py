"""A session pod with copies in S3: training that never waits for them, and the way back when the volume is gone."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop_trainer import exitcodes, peftfiles
from everloop_trainer.session.identifiers import storage_id
from tests.copies.store import Request, Store, error, running
from tests.networks import new_address
from tests.server.pod import Pod, alive, command_line, eventually, kill_process
from tests.server.sdk import SdkProgram, run_command
from tests.server.stub import Stub, serving
from tests.server.test_survival import adapter, assert_equal_states, model_of

LOOP = {"sequences": 8, "length": 40}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(autouse=True)
def faultless(store: Store) -> Iterator[None]:
    yield
    store.fault = None


def configure(pod: Pod, store: Store, prefix: str, pause: float = 0.1, **more: Any) -> None:
    secret = store.credentials(pod.directory / "secret")
    pod.configure(copies={"s3": store.s3(secret, prefix), "snapshotSeconds": pause}, **more)


def copies(pod: Pod) -> dict[str, Any]:
    status = pod.status()
    return dict(status["copies"]) if status is not None else {}


def wait_copied(pod: Pod) -> None:
    """Everything that there is has a copy."""
    eventually(lambda: (found := copies(pod)) and found["pending"] == 0 and found["lastTime"], "copies", 30)


def copier_of(pod: Pod) -> int:
    """Process id of the copier."""

    def probe() -> int | None:
        return next((pid for pid in pod.processes() if command_line(pid)[-2:-1] == ["copies"]), None)

    return eventually(probe, "a copier")


@pytest.fixture(scope="module")
def pod(make_pod: Callable[..., Pod], store: Store) -> Pod:
    """A pod with copies, to be shot at."""
    pod = make_pod()
    configure(pod, store, "pod")
    pod.start()
    pod.wait_until("Serving")
    return pod


@pytest.fixture(scope="module")
def stub(pod: Pod) -> Iterator[Stub]:
    with serving(pod, new_address(), {}) as stub:
        yield stub


def test_training_does_not_wait_for_slow_s3_and_a_killed_copier_begins_again(
    pod: Pod, stub: Stub, store: Store
) -> None:
    """Uploads hang, then the copier is killed in one; the loop goes on, and in the end everything has a copy."""

    def fault(request: Request) -> float | None:
        return 60.0 if request.kind == "PutObject" and "/models/" in request.path else None

    store.fault = fault
    store.blocked.clear()
    with SdkProgram(stub.url, "train", seed=3, steps=60, save_after=1, **LOOP) as program:
        eventually(store.blocked.is_set, "an upload that hangs", 60)
        before = len(program.named("step"))
        eventually(lambda: len(program.named("step")) > before + 2, "steps while it hangs", 30)
        assert copies(pod)["pending"] > 0
        victim = copier_of(pod)
        kill_process(victim)
        store.fault = None
        eventually(lambda: copier_of(pod) != victim, "another copier", 30)
        program.finish()
    assert [event["step"] for event in program.named("step")] == list(range(60))
    wait_copied(pod)
    assert copies(pod)["error"] == ""
    names = {path.split("/")[-3] for path in store.objects("pod/team/tiny/models") if path.endswith("manifest.json")}
    assert {"weights", "sampler_weights"} <= names
    status = pod.status()
    assert status is not None
    assert status["storage"]["error"] == ""


def test_a_copier_ends_with_its_server(pod: Pod) -> None:
    """Nothing is left that would copy for a server which is no more."""
    copier = copier_of(pod)
    server = pod.child("server")
    assert server is not None
    kill_process(server)
    eventually(lambda: not alive(copier), "the end of the copier", 10)
    pod.wait_until("Serving")


def newest_snapshot(pod: Pod) -> dict[str, Any]:
    """The manifest of the newest one in the storage, with the name that its copy has."""
    found = [(json.loads(path.read_text()), path) for path in pod.root.glob("models/*/snapshots/*/manifest.json")]
    manifest, path = max(found, key=lambda each: each[0]["seq"])
    return {**manifest, "copy": f"ended/team/tiny/{path.relative_to(pod.root)}"}


def train(pod: Pod, stub: Stub, steps: int) -> int:
    """A loop that is killed after so many steps; returns the number of the last operation that has a result."""
    with SdkProgram(stub.url, "train", seed=23, steps=100_000, **LOOP) as program:
        model = model_of(program)
        eventually(lambda: len(program.named("step")) >= steps, "steps", 60)
        program.process.kill()
        program.process.wait()
    return max(int(record["n"]) for record in pod.journal() if record["t"] == "result" and record["s"] == model)


def test_a_pod_that_is_stopped_has_its_end_copied_if_there_is_time(make_pod: Callable[..., Pod], store: Store) -> None:
    """Snapshots come first, and are there in any case; copies have what is left of the grace period, and no more."""
    pod = make_pod()
    configure(pod, store, "ended", pause=3600.0)
    pod.environment["EVERLOOP_GRACE_SECONDS"] = "60"
    pod.start()
    pod.wait_until("Serving")
    with serving(pod, new_address(), {}) as stub:
        last = train(pod, stub, 10)
        assert pod.stop() == 0
        snapshot = newest_snapshot(pod)
        assert snapshot["seq"] >= last
        assert snapshot["copy"] in store.objects("ended")
        pod.environment["EVERLOOP_GRACE_SECONDS"] = "15"
        pod.start()
        pod.wait_until("Serving")
        store.fault = lambda request: 60.0 if request.kind == "PutObject" and "/models/" in request.path else None
        last = train(pod, stub, 10)
        begun = time.monotonic()
        assert pod.stop() == 0
        assert time.monotonic() - begun < 15
        snapshot = newest_snapshot(pod)
        assert snapshot["seq"] >= last
        assert snapshot["copy"] not in store.objects("ended")


def test_a_lost_volume_is_restored_and_never_silently(make_pod: Callable[..., Pod], store: Store) -> None:
    """The loop is told where to go on, and from there it ends bit-equal to one that was never interrupted."""
    pod, steps = make_pod(), 12
    configure(pod, store, "lost", snapshots={"replayBudgetSeconds": 0.5})
    pod.start()
    pod.wait_until("Serving")
    with serving(pod, new_address(), {}) as stub:
        with SdkProgram(stub.url, "train", seed=17, steps=100_000, save_after=2, **LOOP) as program:
            model = model_of(program)
            eventually(lambda: len(program.named("step")) >= steps, "steps", 60)
            eventually(lambda: any("/snapshots/" in name for name in store.objects("lost")), "a snapshot's copy", 60)
            program.process.send_signal(signal.SIGSTOP)  # so that there is an end to what is to be copied
            wait_copied(pod)
            lineage = (pod.status() or {})["lineage"]
            pod.kill()
            shutil.rmtree(pod.root)
            program.process.send_signal(signal.SIGCONT)
            pod.start()
            assert pod.wait_until("Serving", 120)["lineage"] == lineage
            assert program.process.wait(60) == 1
            losses = [event["loss"] for event in program.named("step")]
        told = "".join(program.errors)
        assert "rolled back to operation" in told
        listed = run_command(stub.url, "checkpoint", "list", "--run-id", model)["checkpoints"]
        identifiers = [one["checkpoint_id"] for one in listed]
        restored = next(name for name in identifiers if name.startswith("weights/restored-"))
        path, step = f"tinker://{model}/{restored}", int(restored.rpartition("-")[2])
        assert path in told
        assert {"weights/half", "sampler_weights/half"} <= set(identifiers)
        (half,) = pod.root.glob(f"models/{storage_id(model)}/checkpoints/sampler_weights/*/{peftfiles.CONFIG}")
        assert (half.parent / peftfiles.WEIGHTS).samefile(half.parent / "state.safetensors")
        assert 2 < step <= len(losses) + 1
        with SdkProgram(stub.url, "resume", path=path, optimizer=True, start=step, steps=step + 3, **LOOP) as going_on:
            going_on.finish()
        with SdkProgram(stub.url, "train", seed=17, steps=step + 3, **LOOP) as unbroken:
            unbroken.finish()
        assert_equal_states(adapter(pod, model_of(going_on)), adapter(pod, model_of(unbroken)))
        assert [event["loss"] for event in unbroken.named("step")][: len(losses)] == losses[: step + 3]
        wait_copied(pod)
    assert [record["t"] for record in pod.journal() if record.get("s") == model].count("restored") == 1


def test_copies_that_can_not_be_read_are_no_reason_to_begin_anew(make_pod: Callable[..., Pod], store: Store) -> None:
    """An empty volume and no answer from S3: the server says so, and opens nothing until it knows."""
    pod = make_pod()
    configure(pod, store, "unreadable")
    store.fault = lambda _: error("AccessDenied", 403)
    try:
        pod.start("server")

        def told() -> bool:
            status = pod.status()
            return status is not None and "its copies can not be read" in status["storage"]["error"]

        eventually(told, "the reason in the status", 30)
        assert pod.container.wait(60) == exitcodes.STORAGE_FAILED
        assert not Path(pod.root / "identity.json").exists()
    finally:
        store.fault = None
    pod.start("server")
    eventually((pod.root / "identity.json").exists, "the storage, begun once it is known that there are no copies", 60)
