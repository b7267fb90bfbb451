"""The SDKs' programs on one stack, each with the interpreter of its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path

from tests.bench.stack import Stack, serving
from tests.conformance.page import Told
from tests.prepared import client_python, environment_python
from tests.server.pod import REPOSITORY, Pod
from tests.server.tinyvision import NAME, write_tiny_seeing_model

PROGRAM = "tests.conformance.sdk"
SECONDS = 400.0
LONGEST = 256


def told_by_all(place: Path) -> list[Told]:
    """What each SDK says of each of its rows, newest first; `place` is an empty directory."""
    model = place / NAME
    write_tiny_seeing_model(model)
    (place / "stack").mkdir()
    with serving(place / "stack", NAME, model, LONGEST, _many_models) as stack, ExitStack() as running:
        pythons = {"newest": client_python(), "older": environment_python("client-029")}
        programs = [running.enter_context(_program(python, stack, place / name)) for name, python in pythons.items()]
        return [told for program in programs for told in _lines(*program)]


def _many_models(pod: Pod) -> None:
    pod.configure(adapters={"maxModels": 200, "maxRank": 32})


@contextmanager
def _program(python: str, stack: Stack, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """One SDK's, in a directory where the base model's tokenizer is found by its name."""
    home, output = directory / "home", directory / "output"
    home.mkdir(parents=True)
    (directory / NAME).parent.mkdir()
    (directory / NAME).symlink_to(stack.pod.model)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TINKER_BASE_URL": stack.gateway.url,
        "TINKER_API_KEY": stack.key,
        "HOME": str(home),
        "HF_TOKEN": "hf_pretend",
        "TORCH": sysconfig.get_paths()["purelib"],
    }
    command = [python, "-W", "ignore", "-m", PROGRAM, stack.base_model, stack.tenant.namespace]
    with output.open("wb") as out, (directory / "errors").open("wb") as errors:
        process = subprocess.Popen(command, env=environment, cwd=directory, stdout=out, stderr=errors)
    try:
        yield process, directory
    finally:
        process.kill()
        process.wait()


def _lines(process: subprocess.Popen[bytes], directory: Path) -> list[Told]:
    """What a program has said at its end; AssertionError with its traceback unless it ended as it should."""
    code = process.wait(SECONDS)
    assert code == 0, (directory / "errors").read_text()[-4000:]
    known = {field.name for field in fields(Told)}
    said = [json.loads(line) for line in (directory / "output").read_text().splitlines()]
    return [Told(**{name: value for name, value in each.items() if name in known}) for each in said]
