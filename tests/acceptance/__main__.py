"""``make acceptance``: tests in full that load the machine; then the whole kill matrix, beside it all else.

That is twelve minutes without a node, and tests in full: those of which ``make test`` runs a sample.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tests.soak.interrupt import end_like_ctrl_c

ON_CLUSTERS = (
    "tests/e2e/test_node_health.py",
    "tests/e2e/test_pod_failures.py",
    "tests/e2e/test_rl_job.py",
    "tests/acceptance/test_release.py",
)
ALONE = ("tests/gateway/test_real_pod.py",)
"""8,192 samples under way take two processors: with less nobody gets on, and that is not what is tested."""
WITHOUT = (
    "tests/operator/faults",
    "tests/recipes",
    "tests/session/test_model.py",
    "tests/acceptance/test_downloads.py",
    "tests/server/test_fuzz.py",
    "tests/gateway/test_fuzz.py",
    "tests/acceptance/test_vision.py",
    "tests/acceptance/test_wire.py",
)
"""Tests that run in full where EVERLOOP_TEST_WHOLE or EVERLOOP_MODEL_EXAMPLES is set."""
MODEL_EXAMPLES = 5000
"""Histories of any client under any faults; EVERLOOP_MODEL_EXAMPLES asks for another number."""
BUILD = Path(__file__).resolve().parents[2] / "build"
SHOWN_CHARACTERS = 6000


class Parts:
    """Processes at a time, each of which takes down what it set up when it is told to end."""

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self._running: list[subprocess.Popen[bytes]] = []
        self._over = False
        self._start = time.monotonic()

    def run(self, name: str, command: list[str], log: Path | None) -> None:
        """Wait for one of them; without a log it speaks for itself."""
        if self._over:
            return
        with (log or Path(os.devnull)).open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=file if log else None, stderr=file if log else None
            )
            self._running.append(process)
            code = process.wait()
        self.ended[name] = code
        told = "as it should be" if code == 0 else f"FAILED ({code})"
        print(f"{time.monotonic() - self._start:7.1f} s  {name}: {told}{f'; {log}' if log else ''}", flush=True)
        if log and code:
            print(log.read_text(errors="replace")[-SHOWN_CHARACTERS:], flush=True)

    def stop(self) -> None:
        """End what still runs, and begin nothing more."""
        self._over = True
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running:
            process.wait()


def main() -> int:
    """Run all; the exit status is 0 only if all are well."""
    parser = argparse.ArgumentParser(prog="make acceptance", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments, matrix_arguments = parser.parse_known_args()
    BUILD.mkdir(exist_ok=True)
    os.environ.setdefault("EVERLOOP_MODEL_EXAMPLES", str(MODEL_EXAMPLES))
    os.environ |= {"EVERLOOP_TEST_WHOLE": "1", "EVERLOOP_TEST_SEED": str(arguments.seed)}
    seed = ["--seed", str(arguments.seed)]
    # No look at what runs after twenty minutes: these take longer, and the interpreter may crash in it.
    tests = ["pytest", "-v", "-s", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    logs = ("alone", "outage", "clusters", "without")
    alone, outage, clusters, without = (BUILD / f"acceptance-{name}.log" for name in logs)
    print(
        f"seed {arguments.seed}; what runs before and beside the matrix tells its progress in {BUILD}/acceptance-*.log",
        flush=True,
    )
    parts = Parts()

    def away() -> None:
        parts.run("outage", ["tests.soak.outage", *seed], outage)
        parts.run("tests in full on clusters", [*tests, *ON_CLUSTERS], clusters)

    with ThreadPoolExecutor() as pool:
        lines: list[Future[None]] = [pool.submit(parts.run, "tests under load", [*tests, *ALONE], alone)]
        try:
            wait(lines)
            lines += [
                pool.submit(parts.run, "matrix", ["tests.matrix", *seed, *matrix_arguments], None),
                pool.submit(away),
                pool.submit(parts.run, "tests in full without a cluster", [*tests, *WITHOUT], without),
            ]
            wait(lines)
        finally:
            parts.stop()
    for line in lines:
        line.result()
    print(*(f"{name}: {'as it should be' if code == 0 else f'FAILED ({code})'}" for name, code in parts.ended.items()))
    return 1 if any(parts.ended.values()) else 0


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
