"""Runs programs with the interpreter of the environment that holds the tinker SDK and nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, Self

from tests.prepared import client_python

SCRIPT = Path(__file__).with_name("sdk_loop.py")
API_KEY = "tml-0123456789ab-pretend"


COMMAND = """
import os, runpy, sys
code = 0
try:
    runpy.run_module("tinker.cli", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
sys.stdout.flush()
os._exit(code or 0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
"""
"""The SDK's command line."""


def run_client(code: str) -> Any:
    """Runs `code`, which prints one JSON document."""
    done = subprocess.run([client_python(), "-c", code], capture_output=True, text=True, check=True, env={})
    return json.loads(done.stdout)


def run_command(url: str, *arguments: str) -> Any:
    """Runs the SDK's own command line with JSON output and returns what it prints."""
    done = subprocess.run(
        [client_python(), "-c", COMMAND, "--format", "json", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY, "PATH": os.environ["PATH"], "TINKER_TELEMETRY": "0"},
    )
    return json.loads(done.stdout)


def run_commands(url: str, *commands: list[str], directory: Path) -> list[dict[str, Any]]:
    """Runs commands of the SDK's command line there, one after the other; `code`, `out` and `error` of each."""
    environment = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": API_KEY,
        "PATH": os.environ["PATH"],
        "TINKER_TELEMETRY": "0",
    }
    done = subprocess.run(
        [client_python(), str(SCRIPT.with_name("sdk_commands.py")), json.dumps(commands)],
        capture_output=True,
        text=True,
        env=environment | {"HOME": str(directory)},
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class SdkProgram:
    """`sdk_loop.py SCENARIO` as a process; `events` are what it has printed so far."""

    def __init__(self, url: str, scenario: str, **arguments: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [*self.command(), scenario, json.dumps(arguments)],
            env={
                "TINKER_BASE_URL": url,
                "TINKER_API_KEY": API_KEY,
                "TINKER_TELEMETRY": "0",
                "PATH": os.environ["PATH"],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def command() -> list[str]:
        """What is run."""
        return [client_python(), str(SCRIPT)]

    def _read_events(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.events.append(json.loads(line))

    def _read_errors(self, stream: IO[str]) -> None:
        with stream:
            self.errors += stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def named(self, event: str) -> list[dict[str, Any]]:
        """The events of one name so far."""
        return [item for item in self.events if item["event"] == event]

    def finish(self, seconds: float = 120.0) -> None:
        """Waits for the program's end; AssertionError with its traceback unless it ended as it should."""
        code = self.process.wait(timeout=seconds)
        for reader in self._readers:
            reader.join(timeout=5)
        assert code == 0, "".join(self.errors)[-4000:]
        assert self.events[-1] == {"event": "done"}


class CheckpointProgram(SdkProgram):
    """The same of `sdk_checkpoints.py`."""

    @staticmethod
    def command() -> list[str]:
        return [client_python(), "-m", "tests.server.sdk_checkpoints"]


class TorchProgram(SdkProgram):
    """The same of `sdk_losses.py`: what needs torch beside the SDK runs in the tests' own environment."""

    @staticmethod
    def command() -> list[str]:
        return [sys.executable, "-m", "tests.server.sdk_losses"]
