"""Writes docs/conformance.md: `make conformance`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.conformance.page import render
from tests.conformance.running import told_by_all
from tests.server.pod import REPOSITORY

PAGE = REPOSITORY / "docs" / "conformance.md"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        told = told_by_all(Path(place))
    bad = [each for each in told if each.state == "failed"]
    for each in bad:
        print(f"{each.version} {each.row}: {each.message}", file=sys.stderr)
    if bad:
        sys.exit(1)
    PAGE.write_text(render(told))
