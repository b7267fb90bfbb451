"""`make demo` begins with what its own environment has, which is less than that of the tests."""

from __future__ import annotations

import subprocess
import sys

from bootstrap.layout import REQUIREMENTS


def test_the_demo_begins_in_its_own_environment() -> None:
    """All that it imports is there."""
    command = [sys.executable, "-m", "bootstrap", "exec", "devcluster", "python", "-c", "import demo.__main__"]
    done = subprocess.run(command, cwd=REQUIREMENTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
