"""The SDK's own command line, one command after the other in one process: its import is what takes long.

    python sdk_commands.py '[["checkpoint", "list"], ...]'

prints one JSON line for each: how it ended, and what it printed.
"""

from __future__ import annotations

import json
import os
import sys

from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main_cli, ["--format", "json", *arguments])
    error = "" if done.exception is None else str(getattr(done.exception, "message", done.exception))
    print(json.dumps({"code": done.exit_code, "out": done.stdout, "error": error}), flush=True)
# CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135).
os._exit(0)
