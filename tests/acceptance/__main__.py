"""``make acceptance``: the whole kill matrix and, beside it on a cluster of its own, twelve minutes without a node.

Then the tests of which ``make test`` runs a sample, in full.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.soak.interrupt import end_like_ctrl_c

WHOLE = (
    "tests/e2e/test_node_health.py",
    "tests/e2e/test_rl_job.py",
    "tests/session/test_model.py",
    "tests/acceptance/test_release.py",
    "tests/operator/faults",
)
"""Tests that run in full where EVERLOOP_TEST_WHOLE or EVERLOOP_MODEL_EXAMPLES is set."""
MODEL_EXAMPLES = 5000
"""Histories of any client under any faults; EVERLOOP_MODEL_EXAMPLES asks for another number."""
BUILD = Path(__file__).resolve().parents[2] / "build"


def main() -> int:
    """Run all; the exit status is 0 only if all are well."""
    parser = argparse.ArgumentParser(prog="make acceptance", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments, matrix_arguments = parser.parse_known_args()
    BUILD.mkdir(exist_ok=True)
    log = BUILD / "outage.log"
    module, seed = [sys.executable, "-m"], ["--seed", str(arguments.seed)]
    print(f"seed {arguments.seed}; the outage's progress is in {log}", flush=True)
    with log.open("w") as file:
        outage = subprocess.Popen([*module, "tests.soak.outage", *seed], stdout=file, stderr=file)
        matrix = subprocess.Popen([*module, "tests.matrix", *seed, *matrix_arguments])
        try:
            ended = {"matrix": matrix.wait(), "outage": outage.wait()}
        finally:
            for process in (matrix, outage):  # each takes its own cluster down
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait()
    print(log.read_text())
    told = {"EVERLOOP_MODEL_EXAMPLES": str(MODEL_EXAMPLES), **os.environ}
    told |= {"EVERLOOP_TEST_WHOLE": "1", "EVERLOOP_TEST_SEED": str(arguments.seed)}
    ended["tests in full"] = subprocess.call([*module, "pytest", "-v", "-p", "no:cacheprovider", *WHOLE], env=told)
    print(*(f"{name}: {'as it should be' if code == 0 else f'FAILED ({code})'}" for name, code in ended.items()))
    return 1 if any(ended.values()) else 0


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
