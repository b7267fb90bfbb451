"""Adapters of real weights are downloaded by the SDK's and the cookbook's own programs, while what serves is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everloop_trainer.engine.base import load_base
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.model import load_adapter
from everloop_trainer.engine.state import read_lora
from everloop_trainer.session.identifiers import storage_id
from tests.bench.stack import Stack, serving
from tests.engine.test_export import engine_logits, peft_logits, peft_model
from tests.prepared import base_model, client_python, environment_python
from tests.server.pod import REPOSITORY, eventually, kill_process, process_of
from tests.server.sdk import COMMAND
from tests.whole import only_whole

pytestmark = only_whole

PROGRAM = REPOSITORY / "tests" / "acceptance" / "sdk_download.py"
WEIGHTS = "adapter_model.safetensors"
MUCH = 50_000_000
"""Bytes: less than the weights have by more than what is under way between a pod and a client that is stopped."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Gateway and session pod with SmolLM2."""
    with serving(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def trained(stack: Stack) -> str:
    """The path of a training checkpoint."""
    with running(stack, [client_python(), str(PROGRAM), "train", stack.base_model], stack.pod.directory) as process:
        return ended(process).strip()


@contextmanager
def running(stack: Stack, command: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A user's program."""
    environment = {
        "PATH": os.environ["PATH"],
        "TINKER_BASE_URL": stack.gateway.url,
        "TINKER_API_KEY": stack.key,
        "TINKER_TELEMETRY": "0",
        "HOME": str(directory),
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, cwd=directory, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a program has printed at its end, which is to be of that kind."""
    out, errors = process.communicate(timeout=240)
    assert process.returncode == code, errors[-4000:]
    return out


def command_line(path: str) -> list[str]:
    """`tinker checkpoint download` into the directory that it runs in."""
    return [client_python(), "-c", COMMAND, "--format", "json", "checkpoint", "download", path]


def cookbook(path: str) -> list[str]:
    return [environment_python("cookbook"), str(PROGRAM), "download", path, "got"]


@contextmanager
def stopped_in_the_middle(process: subprocess.Popen[str], directory: Path) -> Iterator[None]:
    """For the length of the block, the client takes no more of the weights than it has."""

    def size() -> int:
        return max((path.stat().st_size for path in directory.rglob(f"{WEIGHTS}*")), default=0)

    eventually(size, "some of the weights", 180, every=0.0005)
    process.send_signal(signal.SIGSTOP)
    try:
        assert size() < MUCH, "the client was too fast to be caught in the middle"
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def check_logits(stack: Stack, got: Path, trained: str) -> None:
    """PEFT computes what the engine does from the checkpoint that was trained, bit by bit."""
    run = trained.removeprefix("tinker://").split("/")[0]
    (state,) = (stack.pod.root / "models" / storage_id(run) / "checkpoints" / "weights").glob("*/state.safetensors")
    base = load_base(SpareConfig(Path("unused"), base_model(), "test"))
    adapter, _ = load_adapter(base, state, read_lora(state), "weights")
    found = peft_logits(peft_model(base_model(), got))
    assert torch.equal(found, engine_logits(base, adapter))
    assert not torch.equal(found, engine_logits(base, None))


@pytest.mark.parametrize("client", [command_line, cookbook], ids=["command line", "cookbook"])
def test_a_pod_dies_in_every_part_of_a_download(
    stack: Stack, trained: str, tmp_path: Path, client: Callable[[str], list[str]]
) -> None:
    """Before a model is made, and amid the weights: no error, and the very adapter; the export is gone."""
    with running(stack, client(trained), tmp_path) as process:
        kill_process(process_of(stack.pod, "server"))
        with stopped_in_the_middle(process, tmp_path):
            kill_process(process_of(stack.pod, "server"))
        ended(process)
    (config,) = tmp_path.glob("*/adapter_config.json")
    assert {path.name for path in config.parent.iterdir()} == {"README.md", "adapter_config.json", WEIGHTS}
    check_logits(stack, config.parent, trained)
    assert not list(stack.pod.root.glob("models/*/checkpoints/external_weights/*/manifest.json"))


def test_a_gateway_that_dies_fails_a_download_loudly(stack: Stack, trained: str, tmp_path: Path) -> None:
    """Nothing that is truncated is left; the same command again, and all is there."""
    with running(stack, command_line(trained), tmp_path) as process:
        with stopped_in_the_middle(process, tmp_path):
            stack.gateway.process.kill()
            stack.gateway.process.wait()
            stack.gateway.start()
        ended(process, code=1)
    assert not list(tmp_path.glob("*_weights_*"))
    with running(stack, command_line(trained), tmp_path) as process:
        ended(process)
    (config,) = tmp_path.glob("*/adapter_config.json")
    check_logits(stack, config.parent, trained)
