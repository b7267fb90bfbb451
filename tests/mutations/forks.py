"""Runs pytest again and again on one directory, each time in a fork of a process that has imported what takes long.

Reads a JSON list of pytest's arguments from each line of standard input; answers each with a JSON object of the exit
`code` and the `output`. Nothing of the project is imported before the fork, so each run meets the sources as they are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile

import hypothesis
import pydantic
import pytest
import starlette.applications
import structlog
import uvicorn

LONG_IMPORTS = (hypothesis, pydantic, starlette.applications, structlog, uvicorn)
SECONDS = 120
"""A run that takes longer is ended."""


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit code (negative for a signal) and what was printed."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        code, output = run(json.loads(line))
        answers.write(json.dumps({"code": code, "output": output}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
