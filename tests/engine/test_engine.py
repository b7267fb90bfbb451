"""Engines over their socket: processes, streams of operations, and state that survives them."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everloop_trainer.engine import framing
from everloop_trainer.engine.base import manifest_sha256
from everloop_trainer.tinker_proto import tinker_public
from tests.engine.client import ADAM, LORA, SAMPLE, Engine, Refused, datum, output_of, request
from tests.engine.conftest import running_spare
from tests.engine.processes import alive, cpu_seconds, wait_until

RANKS = {"small": {**LORA, "rank": 2, "seed": 1}, "large": {**LORA, "rank": 16, "seed": 2, "train_unembed": False}}

SHORT = ["--max-sequence-length", "512"]


def _body(seed: int, rows: int = 3, length: int = 20) -> bytes:
    generator = np.random.default_rng(seed)
    return request(*(datum(generator.integers(0, 320, length).tolist()) for _ in range(rows)))


def _long(rows: int) -> bytes:
    return _body(9, rows=rows, length=500)


def test_hello(tiny_spare: Path, tiny_model: Path) -> None:
    """The engine introduces itself; only its own user may connect."""
    with Engine(tiny_spare) as engine:
        hello = engine.hello
    assert hello["event"] == "hello"
    assert (hello["base_model"], hello["vocab_size"], hello["max_sequence_length"]) == ("test", 320, 512)
    assert (hello["dtype"], hello["threads"]) == ("float32", 2)
    assert hello["files_sha256"] == manifest_sha256(tiny_model)
    assert hello["cpu_capability"]
    assert stat.S_IMODE(tiny_spare.stat().st_mode) == 0o600


def test_manifest_follows_names_and_contents(tmp_path: Path) -> None:
    """The hash changes with a name or a byte, and not with files whose name or folder starts with a dot."""
    (tmp_path / "a").write_bytes(b"1")
    first = manifest_sha256(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_bytes(b"2")
    assert manifest_sha256(tmp_path) == first
    (tmp_path / "a").write_bytes(b"2")
    second = manifest_sha256(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, manifest_sha256(tmp_path)}) == 3


def test_training_learns(tiny_spare: Path) -> None:
    """Twenty steps on the same data bring the loss down by far, and forward reports the same number."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        losses = [output_of(engine.step("m", 2 * i + 1, _body(1), learning_rate=1e-2)[0])[0] for i in range(20)]
        assert losses[-1] < losses[0] / 2
        _, body = engine.call("forward_backward", _body(1), model="m", seq=41, forward_only=True)
        assert output_of(body)[0] < losses[-1] * 1.1


def test_interleaved_models_equal_each_alone(tiny_spare: Path, tmp_path: Path) -> None:
    """Two models of different rank trained in turns, with samples between, have the bits of each trained alone."""
    alone = {}
    for name, lora in RANKS.items():
        with Engine(tiny_spare) as engine:
            engine.call("init", model=name, **lora)
            for index in range(4):
                engine.step(name, 2 * index + 1, _body(index))
            alone[name] = engine.saved(name, tmp_path / "alone" / name)
    with Engine(tiny_spare) as engine:
        for name, lora in RANKS.items():
            engine.call("init", model=name, **lora)
        for index in range(4):
            for name in RANKS:
                engine.call("forward_backward", _body(index), model=name, seq=2 * index + 1, forward_only=False)
            engine.call("sample", prompt=[1, 2], **SAMPLE)
            for name in reversed(RANKS):
                engine.call("optim_step", model=name, seq=2 * index + 2, **ADAM)
        for name in RANKS:
            assert engine.saved(name, tmp_path / "together" / name) == alone[name]
    assert alone["small"] != alone["large"]


def test_a_cancelled_sample_makes_room_and_has_no_answer(tiny_spare: Path) -> None:
    """As many as are decoded side by side are let go of; what waited for their places is answered next."""
    with Engine(tiny_spare) as engine:
        long = engine.send("sample", prompt=[1], **{**SAMPLE, "num_samples": 64, "max_tokens": 500, "stop": []})
        waiting = engine.send("sample", prompt=[1, 2], **SAMPLE)
        engine.call("cancel", sample=long)
        engine.answer(waiting)
        engine.call("cancel", sample=waiting)
        engine.call("sample", prompt=[1, 2], **SAMPLE)


@pytest.mark.parametrize("outstanding", [False, True], ids=["boundary", "gradients outstanding"])
def test_restore_and_replay_equal_the_unbroken_run(tiny_spare: Path, tmp_path: Path, outstanding: bool) -> None:
    """A snapshot taken up by another process, followed by the later operations, ends in the same bits."""
    cut = 3 if outstanding else 2
    operations: list[tuple[str, bytes, dict[str, Any]]] = []
    for index in range(3):
        operations += [("forward_backward", _body(index), {"forward_only": False}), ("optim_step", b"", ADAM)]

    def run(engine: Engine, first: int, last: int) -> list[bytes]:
        answers = []
        for seq in range(first, last + 1):
            op, body, fields = operations[seq - 1]
            answers.append(engine.call(op, body, model="m", seq=seq, **fields)[1])
        return answers

    path = tmp_path / "snapshots" / "state.safetensors"
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        run(engine, 1, cut)
        engine.call("snapshot", model="m", seq=cut, path=str(path))
        answers = run(engine, cut + 1, 6)
        unbroken = engine.saved("m", tmp_path / "unbroken", seq=6)
        event = engine.event()
    assert event == {
        "event": "written",
        "model": "m",
        "seq": cut,
        "path": str(path),
        "sha256": event["sha256"],
        "bytes": path.stat().st_size,
    }
    with Engine(tiny_spare) as other:
        restore = {"model": "m", "path": str(path), "lora": LORA, "sha256": event["sha256"], "parts": "all"}
        header, _ = other.call("restore", **restore)
        assert (header["seq"], header["step"], header["gradients"]) == (cut, 1, outstanding)
        assert run(other, cut + 1, 6) == answers
        assert other.saved("m", tmp_path / "replayed", seq=6) == unbroken


@pytest.mark.parametrize("optimizer", [True, False], ids=["with optimizer", "weights only"])
def test_a_checkpoint_begins_another_model(tiny_spare: Path, tmp_path: Path, optimizer: bool) -> None:
    """With its optimizer it goes on to the same bits, without it with a fresh one; gradients never come with it."""
    path = tmp_path / "checkpoint"
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.step("m", 1, _body(1))
        engine.call("forward_backward", _body(2), model="m", seq=3, forward_only=False)
        header, _ = engine.call("write", model="m", seq=4, path=str(path), parts="all")
        engine.call("drop_gradients", model="m", seq=5)
        load = {"model": "n", "path": str(path), "lora": LORA, "sha256": header["sha256"], "optimizer": optimizer}
        assert engine.call("load", **load)[0]["step"] == int(optimizer)
        outputs = [engine.step(model, seq, _body(3))[0] for model, seq in (("m", 6), ("n", 1))]
        assert outputs[0] == outputs[1]
        states = [engine.saved(model, tmp_path / model, seq=9) for model in ("m", "n")]
        assert (states[0] == states[1]) is optimizer
        with pytest.raises(Refused, match="SHA-256 is"):
            engine.call("load", **{**load, "sha256": "0" * 64})


def test_weights_alone(tiny_spare: Path, tmp_path: Path) -> None:
    """Parts "weights" hold and restore the adapter only: same losses, optimizer and numbers anew."""
    path = tmp_path / "weights"
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.step("m", 1, _body(1))
        header, _ = engine.call("write", model="m", seq=2, path=str(path), parts="weights")
        _, expected = engine.call("forward_backward", _body(2), model="m", seq=3, forward_only=True)
        restore = {"path": str(path), "lora": LORA, "sha256": header["sha256"], "parts": "weights"}
        restored, _ = engine.call("restore", model="copy", **restore)
        assert (restored["seq"], restored["step"], restored["gradients"]) == (0, 0, False)
        assert engine.call("forward_backward", _body(2), model="copy", seq=1, forward_only=True)[1] == expected
        with pytest.raises(Refused, match=r"holds weights alone"):
            engine.call("restore", model="other", **{**restore, "parts": "all"})
        with pytest.raises(Refused, match="SHA-256 is") as refusal:
            engine.call("restore", model="other", **{**restore, "sha256": "0" * 64})
        assert refusal.value.category == "server"
        with pytest.raises(Refused, match="expected LoraSpec"):
            engine.call("restore", model="other", **{**restore, "lora": {**LORA, "seed": 99}})
        with pytest.raises(Refused, match="'other' is not loaded"):
            engine.call("optim_step", model="other", seq=1, **ADAM)


def test_accumulation(tiny_spare: Path, tmp_path: Path) -> None:
    """Gradients of several operations add up to that of one; dropping them is as if they had never been."""
    first, second = datum([1, 2, 3, 4]), datum([9, 8, 7])
    states = {}
    with Engine(tiny_spare) as engine:
        for name, bodies in {"two": [request(first), request(second)], "one": [request(first, second)]}.items():
            engine.call("init", model=name, **LORA)
            for index, body in enumerate(bodies):
                engine.call("forward_backward", body, model=name, seq=index + 1, forward_only=False)
            metrics = engine.call("optim_step", model=name, seq=3, **ADAM)[0]["metrics"]
            states[name] = metrics["grad_norm"]
        assert states["two"] == pytest.approx(states["one"], rel=1e-5)

        before = engine.saved("one", tmp_path / "before")
        engine.call("forward_backward", request(first), model="one", seq=4, forward_only=False)
        engine.call("drop_gradients", model="one", seq=5)
        header, _ = engine.call("optim_step", model="one", seq=6, **ADAM)
        assert header["metrics"] == {"skipped_no_gradients": 1.0}
        assert engine.saved("one", tmp_path / "after") == before


def test_an_operation_is_never_applied_twice(tiny_spare: Path, tmp_path: Path) -> None:
    """A number that was applied is refused and changes nothing; so is a step with bad parameters."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.step("m", 1, _body(1))
        engine.call("forward_backward", _body(1), model="m", seq=3, forward_only=False)
        before = engine.saved("m", tmp_path / "before")
        with pytest.raises(Refused, match="operation 3 was already applied") as refusal:
            engine.call("forward_backward", _body(1), model="m", seq=3, forward_only=False)
        assert refusal.value.category == "server"
        with pytest.raises(Refused, match=r"^adam_params\.eps: ") as refusal:
            engine.call("optim_step", model="m", seq=4, **{**ADAM, "eps": 0.0})
        assert refusal.value.category == "user"
        assert engine.saved("m", tmp_path / "after") == before


def test_bad_adapters(tiny_spare: Path) -> None:
    """Rank 0 and an adapter of nothing are user errors that name the field; a dropped model is gone."""
    with Engine(tiny_spare) as engine:
        for changes in ({"rank": 0}, {"rank": 17}, dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False)):
            with pytest.raises(Refused) as refusal:
                engine.call("init", model="m", **{**LORA, **changes})
            assert refusal.value.category == "user"
            assert str(refusal.value).startswith(next(iter(changes)))
        engine.call("init", model="m", **LORA)
        engine.call("drop", model="m")
        with pytest.raises(Refused, match="'m' is not loaded"):
            engine.call("optim_step", model="m", seq=1, **ADAM)


def test_content_never_ends_the_engine(tiny_spare: Path, tmp_path: Path) -> None:
    """Numbers at the end of float32 and names without end are the user's errors; the model stays as it was."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        large = request(datum([1, 2, 3], weights=[1e36] * 3))
        complaint = ""
        for seq in itertools.count(1):  # each gradient alone is finite
            try:
                engine.call("forward_backward", large, model="m", seq=seq, forward_only=False)
            except Refused as refused:
                complaint = str(refused)
                break
        assert complaint.startswith("data: the gradients accumulated since")
        endless = request(loss_fn="x" * (framing.MAX_HEADER_BYTES + 1))
        before = engine.saved("m", tmp_path / "before")
        with pytest.raises(Refused, match=r"^adam_params\.learning_rate: must be"):
            engine.call("optim_step", model="m", seq=seq, **{**ADAM, "learning_rate": 1e39})
        with pytest.raises(Refused, match=r"^loss_fn: 'xxx"):
            engine.call("forward_backward", endless, model="m", seq=seq, forward_only=False)
        assert engine.saved("m", tmp_path / "after") == before
        engine.call("optim_step", model="m", seq=seq, **ADAM)


def test_failed_snapshot_is_reported(tiny_spare: Path, tmp_path: Path) -> None:
    """A snapshot that cannot be written ends in an event with the reason, and training goes on."""
    path = tmp_path / "taken"
    path.write_bytes(b"precious")
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.call("snapshot", model="m", seq=0, path=str(path))
        event = engine.event()
        assert (event["event"], event["model"], event["seq"]) == ("write_failed", "m", 0)
        assert "File exists" in event["error"]
        with pytest.raises(Refused, match="File exists") as refusal:
            engine.call("write", model="m", seq=0, path=str(path), parts="all")
        assert refusal.value.category == "server"
        engine.step("m", 1, _body(1))
    assert path.read_bytes() == b"precious"


def test_sampling_from_stored_weights_disturbs_nothing(tiny_spare: Path, tmp_path: Path) -> None:
    """Stored weights stay what they were while their model trains on, and differ from the base."""
    greedy = {**SAMPLE, "prompt": [5, 6, 7], "temperature": 0.0, "stop": []}
    path = tmp_path / "frozen"
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        base = engine.call("sample", **greedy)[1]
        for index in range(10):
            engine.step("m", 2 * index + 1, _body(1), learning_rate=1e-2)
        header, _ = engine.call("write", model="m", seq=20, path=str(path), parts="weights")
        frozen = {"weights": str(path), "sha256": header["sha256"], "lora": LORA}
        sampled = engine.call("sample", **{**greedy, **frozen})[1]
        assert sampled != base
        before = engine.saved("m", tmp_path / "before")
        assert engine.call("sample", **greedy)[1] == base
        assert engine.saved("m", tmp_path / "after") == before
        engine.step("m", 21, _body(2), learning_rate=1e-2)
        path.unlink()  # it is cached by its hash
        assert engine.call("sample", **{**greedy, **frozen})[1] == sampled
        with pytest.raises(Refused, match="No such file"):
            engine.call("sample", **{**greedy, **frozen, "sha256": "0" * 64})
        with pytest.raises(Refused, match=r"^sampling_params\.top_p") as refusal:
            engine.call("sample", **{**greedy, "top_p": 2.0})
        assert refusal.value.category == "user"
    assert len(tinker_public.SampleResponse.FromString(sampled).sequences[0].tokens) == 8 * 4


def test_out_of_memory_fails_the_operation_only(tiny_spare: Path, tmp_path: Path) -> None:
    """When memory ends in the middle of an operation, it fails as the server's fault, and its repeat succeeds."""
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        engine.step("m", 1, _body(1))
        engine.call("forward_backward", _body(2), model="m", seq=3, forward_only=False)
        before = engine.saved("m", tmp_path / "before")
        in_use = int(Path(f"/proc/{engine.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.prlimit(engine.pid, resource.RLIMIT_AS, (in_use + (2 << 20), resource.RLIM_INFINITY))
        with pytest.raises(Refused, match="out of memory") as refusal:
            engine.call("forward_backward", _long(8), model="m", seq=4, forward_only=False)
        assert refusal.value.category == "server"
        resource.prlimit(engine.pid, resource.RLIMIT_AS, limits)
        assert engine.saved("m", tmp_path / "after") == before
        engine.call("forward_backward", _long(8), model="m", seq=4, forward_only=False)


def test_engine_ends_with_its_connection_in_the_middle_of_a_step(tiny_spare: Path) -> None:
    """Closing the connection while the engine computes ends it long before the step would."""
    engine = Engine(tiny_spare)
    engine.call("init", model="m", **LORA)
    idle = cpu_seconds(engine.pid)
    engine.send("forward_backward", _long(2000), model="m", seq=1, forward_only=False)
    wait_until(lambda: cpu_seconds(engine.pid) > idle + 0.2)
    engine.socket.close()
    wait_until(lambda: not alive(engine.pid), seconds=5)


def test_a_defect_ends_the_engine(tiny_spare: Path) -> None:
    """What is neither bad content nor lack of means is not answered: the connection ends, and the log says why."""
    with Engine(tiny_spare) as engine:
        number = engine.send("no such operation")
        with pytest.raises(EOFError):
            engine.answer(number)
        wait_until(lambda: not alive(engine.pid))
    log = (tiny_spare.parent / "spare.log").read_text()
    assert "KeyError: 'no such operation'" in log
    wait_until(lambda: f"engine {engine.pid} ended with status 70" in (tiny_spare.parent / "spare.log").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_engines_outlive_the_spare(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """An engine goes on training when the spare is gone; the next spare gives further engines on the same path."""
    with running_spare(tmp_path, tiny_model, *SHORT) as (socket, spare):
        with Engine(socket) as engine:
            engine.call("init", model="m", **LORA)
            # To the whole group, as a supervisor or a terminal would send it.
            assert os.getpgid(engine.pid) != os.getpgid(spare.pid)
            spare.send_signal(number)
            assert spare.wait(30) == (0 if number == signal.SIGTERM else -9)
            engine.step("m", 1, _body(1))
            with running_spare(tmp_path, tiny_model, *SHORT) as (again, _), Engine(again) as other:
                other.call("init", model="m", **LORA)
                other.step("m", 1, _body(1))
                engine.step("m", 3, _body(2))
        wait_until(lambda: not alive(engine.pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_engine_is_reaped_and_logged(tiny_spare: Path, number: signal.Signals) -> None:
    """A killed engine is end of file to its peer; the spare collects it, says so, and forks the next one."""
    with Engine(tiny_spare) as engine:
        os.kill(engine.pid, number)
        with pytest.raises(EOFError):
            engine.answer(0)
        wait_until(lambda: not Path(f"/proc/{engine.pid}").exists())
    line = f"engine {engine.pid} was killed by {number.name}"
    wait_until(lambda: line in (tiny_spare.parent / "spare.log").read_text())
    with Engine(tiny_spare) as other:
        other.call("init", model="m", **LORA)


def test_samples_are_under_way_beside_other_operations(tiny_spare: Path) -> None:
    """A short sample, and an operation that came after both, are answered before a long one; bits are as if alone."""
    long, short = {**SAMPLE, "prompt": [1, 2], "max_tokens": 400, "stop": []}, {**SAMPLE, "prompt": [3], "stop": []}
    with Engine(tiny_spare) as engine:
        alone = [engine.call("sample", **fields)[1] for fields in (long, short)]
        engine.call("init", model="m", **LORA)
        numbers = [engine.send("sample", **fields) for fields in (long, short)]
        numbers.append(engine.send("forward_backward", request(datum([1, 2, 3])), model="m", seq=1, forward_only=False))
        answers: list[tuple[int, bytes]] = []
        while len(answers) < 3:
            header, body = framing.receive(engine.socket)
            if "event" not in header:
                assert header["ok"], header
                answers.append((header["id"], body))
    assert answers[-1] == (numbers[0], alone[0])
    assert (numbers[1], alone[1]) in answers
