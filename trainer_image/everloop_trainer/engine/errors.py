"""Failures of one operation that leave the engine and its state as they were."""

from __future__ import annotations

import re

import torch

ACCELERATOR_FAILURES = re.compile(
    r"uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|no CUDA-capable device is detected|"
    r"device\(s\) is/are busy or unavailable|GPU is lost|fallen off the bus"
)
"""What the CUDA runtime says of a device that is broken (cudaGetErrorString), or that is gone.

Other errors of CUDA, such as an illegal access, are as likely to be a defect of the program.
"""


def accelerator_failed(error: Exception) -> bool:
    """Whether an error of torch tells of a device that no other engine on this node should be given."""
    return isinstance(error, RuntimeError) and ACCELERATOR_FAILURES.search(str(error)) is not None


_CPU_ALLOCATOR = "DefaultCPUAllocator"


def out_of_memory(error: Exception) -> bool:
    """Tell lack of memory from a defect: on CPU torch reports it as a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)


class ContentError(Exception):
    """What the user sent cannot be computed; the message starts with the field, e.g. `data[1].loss_fn: ...`."""


class StateError(Exception):
    """A model is not loaded, an operation comes out of order, or a state file is not what it should be."""
