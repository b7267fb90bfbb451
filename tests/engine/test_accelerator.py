"""A broken accelerator ends the engine, its spare and the pod, with its own words; other errors of CUDA do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everloop_trainer.engine.errors import accelerator_failed
from everloop_trainer.engine.spare import _reap
from everloop_trainer.exitcodes import ACCELERATOR_FAILED

REPOSITORY = Path(__file__).resolve().parents[2]
ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
ENGINE = f"""
from everloop_trainer.engine.worker import Worker
def broken(header, body):
    raise RuntimeError({ECC!r})
worker = Worker.__new__(Worker)
worker._operations = {{"forward_backward": broken}}
worker._answer({{"op": "forward_backward", "id": 1}}, b"")
"""


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        (ECC, True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("No CUDA GPUs are available: no CUDA-capable device is detected", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("DefaultCPUAllocator: can't allocate memory", False),
    ],
)
def test_which_errors_tell_of_a_broken_device(message: str, broken: bool) -> None:
    """Only those that another engine on the same node would meet again."""
    assert accelerator_failed(RuntimeError(message)) is broken
    assert not accelerator_failed(ValueError(message))


def test_an_engine_leaves_its_last_words(tmp_path: Path) -> None:
    """A process of its own meets the error: exit status and termination message are for the operator."""
    words = tmp_path / "termination"
    words.touch()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY / "trainer_image"),
        "EVERLOOP_TERMINATION_LOG": str(words),
    }
    done = subprocess.run([sys.executable, "-c", ENGINE], env=environment, capture_output=True, check=False)
    assert done.returncode == ACCELERATOR_FAILED, done.stderr
    assert words.read_text().startswith("AcceleratorFailed: CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize("status", [0, 1, ACCELERATOR_FAILED])
def test_a_spare_passes_on_how_its_engine_ended(status: int) -> None:
    """Only the one status that no other engine can help against."""
    pid = os.fork()
    if pid == 0:
        os._exit(status)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert _reap() == (ACCELERATOR_FAILED if status == ACCELERATOR_FAILED else 0)
