"""Runs of the tests beside each other, each with addresses of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHOW = "from tests.networks import network, new_address; print(network(), new_address(), flush=True); input()"
REPOSITORY = Path(__file__).resolve().parents[2]


def test_processes_that_run_at_a_time_have_different_networks() -> None:
    """However they begin; a network is free again once its process has been killed."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SHOW], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    try:
        shown = [run.stdout.readline().split() for run in runs if run.stdout is not None]
        assert len({network for network, _ in shown}) == len(runs), shown
        assert all(address.startswith(f"{network}.") for network, address in shown)
        runs[0].kill()
        runs[0].wait()
        again = subprocess.run(
            [sys.executable, "-c", SHOW], cwd=REPOSITORY, input="\n", capture_output=True, text=True, check=True
        )
        assert again.stdout.split()[0] not in {network for network, _ in shown[1:]}
    finally:
        for run in runs:
            run.kill()
            run.communicate()
