"""Spares and base models for the engine's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import everloop_trainer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: the tests share their cores

from tests.engine.client import connect
from tests.engine.models import make_model
from tests.prepared import base_model
from tests.server.tinyvision import write_tiny_seeing_model

if TYPE_CHECKING:
    from everloop_trainer.engine.base import BaseModel


@contextmanager
def running_spare(directory: Path, model: Path, *options: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A spare with 2 threads per engine on a socket in `directory`; its log is `directory`/spare.log."""
    socket = directory / "spare.sock"
    command = [sys.executable, "-m", "everloop_trainer.engine", "--base-model", "test", "--threads", "2"]
    command += ["--socket", str(socket), "--model-path", str(model), *options]
    root = str(Path(everloop_trainer.__file__).parents[1])
    with (directory / "spare.log").open("ab") as log:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stderr=log)
    try:
        connect(socket, process).socket.close()
        yield socket, process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama: 2 layers, hidden 64, vocabulary 320, tied head."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_spare(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a spare of the tiny model."""
    options = ["--max-sequence-length", "512", "--max-rank", "16"]
    with running_spare(tmp_path_factory.mktemp("spare"), tiny_model, *options) as (socket, _):
        yield socket


@pytest.fixture(scope="session")
def tiny_base(tiny_model: Path) -> BaseModel:
    """The tiny model in this process."""
    from everloop_trainer.engine.base import load_base
    from everloop_trainer.engine.config import SpareConfig

    config = SpareConfig(Path("unused"), tiny_model, "test", max_sequence_length=512, max_rank=16)
    return load_base(config)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Qwen3-VL: 3 layers, hidden 64, vocabulary 320; an image has 1 to 16 tokens."""
    directory = tmp_path_factory.mktemp("seeing") / "model"
    write_tiny_seeing_model(directory)
    return directory


@pytest.fixture(scope="session")
def seeing_base(seeing_model: Path) -> BaseModel:
    """That model in this process."""
    from everloop_trainer.engine.base import load_base
    from everloop_trainer.engine.config import SpareConfig

    return load_base(SpareConfig(Path("unused"), seeing_model, "test/seeing", max_sequence_length=128))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, which the bootstrap converts."""
    return base_model()


@pytest.fixture(scope="session")
def real_spare(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a spare of SmolLM2."""
    with running_spare(tmp_path_factory.mktemp("real"), real_model) as (socket, _):
        yield socket
