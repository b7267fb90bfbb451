"""The classes of failures: by what each is recognised, what is done, which budget it uses, and what a person can do.

`python -m everloop_operator.core.failure_classes` writes them as docs/failures.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everloop_operator.api import names

Budgeted = Literal["none", "infrastructure", "application"]
Exhausted = Literal["", "infrastructure", "application"]
"""The budget that is used up, or ''."""


@dataclass(frozen=True, slots=True)
class FailureClass:
    """One row of the table."""

    reason: str
    """Its name in status, conditions and events."""
    signs: str
    """By what it is recognised."""
    action: str
    budget: Budgeted
    remedy: str
    """What a person can do; empty where nothing is left to do."""
    backs_off: bool = False
    """Whether the next attempt waits, longer each time: the same cause may be met again at once."""
    shuns_node: bool = False
    """Whether the next attempts must not run on the same node, for `recovery.avoidSeconds`."""


NEXT = "new attempt"
IN_PLACE = "the kubelet starts the container again in the same pod"
WAITS = "waits, and goes on by itself"

REPLACED = (
    FailureClass(
        names.RECOVERY_NODE_LOST,
        "node not Ready for `operator.nodeLostSeconds`, or taint `node.kubernetes.io/out-of-service`",
        NEXT, "infrastructure", "look at the node; the session has left it", shuns_node=True,
    ),
    FailureClass(
        names.RECOVERY_NODE_GONE, "node deleted, or another node of its name (UID)",
        NEXT, "infrastructure", "",
    ),
    FailureClass(
        names.RECOVERY_NODE_HEALTH, "a rule of docs/node-health.md",
        NEXT, "infrastructure", "look at the node, or at the rule", shuns_node=True,
    ),
    FailureClass(
        names.RECOVERY_POD_LOST, "pod object no longer there", NEXT, "infrastructure",
        "find out who removed it by force",
    ),
    FailureClass(names.RECOVERY_POD_DELETED, "pod is being deleted", NEXT, "none", ""),
    FailureClass(
        names.RECOVERY_PREEMPTED, "condition DisruptionTarget `PreemptionByScheduler`; pod `Preempting`",
        NEXT, "none", "raise spec.pod.priorityClassName, or wait for room",
    ),
    FailureClass(
        names.RECOVERY_DRAINED, "condition DisruptionTarget `EvictionByEvictionAPI`: a drain", NEXT, "none", ""
    ),
    FailureClass(
        names.RECOVERY_NODE_SHUTDOWN,
        "pod `Terminated`, `NodeShutdown` or `Shutdown`; condition DisruptionTarget `TerminationByKubelet`",
        NEXT, "infrastructure", "", backs_off=True, shuns_node=True,
    ),
    FailureClass(
        names.RECOVERY_DISRUPTED,
        "condition DisruptionTarget `DeletionByTaintManager`, `DeletionByPodGC` and any other",
        NEXT, "infrastructure", "look at the taints of the node",
    ),
    FailureClass(
        names.RECOVERY_EVICTED, "pod `Evicted`: its node ran out of memory, disk or process identifiers",
        NEXT, "infrastructure", "request as much memory and ephemeral storage as the session uses", backs_off=True,
    ),
    FailureClass(
        names.RECOVERY_POD_REJECTED,
        "the kubelet does not admit the pod: `UnexpectedAdmissionError`, `OutOf...`, `NodeAffinity`, `NodePorts`, "
        "`TopologyAffinityError` and others",
        NEXT, "infrastructure", "look at the device plugin and the allocatable resources of the node", backs_off=True,
    ),
    FailureClass(
        names.RECOVERY_ACCELERATOR_FAILED,
        f"exit code {names.EXIT_ACCELERATOR_FAILED}: uncorrectable ECC or NVLink error, device lost",
        NEXT, "infrastructure", "have the device checked (nvidia-smi -q, XID in the kernel log)", shuns_node=True,
    ),
    FailureClass(
        names.RECOVERY_FENCED, f"exit code {names.EXIT_FENCED}: another incarnation owns the storage",
        NEXT, "infrastructure", "see that only one TrainingSession uses this storage",
    ),
    FailureClass(
        names.RECOVERY_NO_PROGRESS, "one operation runs for more than `deadlines.progressSeconds`",
        NEXT, "application", "send smaller batches, or raise spec.deadlines.progressSeconds",
    ),
    FailureClass(
        names.RECOVERY_POD_FAILED, "pod Failed or Succeeded, for any other reason", NEXT, "infrastructure",
        "read the message of the pod", backs_off=True,
    ),
)  # fmt: skip
"""An attempt is over, and another takes over from the journal."""

IN_POD = (
    FailureClass(
        names.FAILURE_OUT_OF_MEMORY, "container `OOMKilled`", IN_PLACE, "infrastructure",
        "raise the memory limit in spec.workers.resources",
    ),
    FailureClass(
        names.FAILURE_OUT_OF_MEMORY_AGAIN, "container `OOMKilled` twice at the same operation", IN_PLACE, "application",
        "send smaller batches, or raise the memory limit in spec.workers.resources",
    ),
    FailureClass(
        names.FAILURE_BAD_CONFIGURATION, "exit code 78: the trainer does not understand its configuration", IN_PLACE,
        "application", "use a trainer image of the operator's version",
    ),
    FailureClass(
        names.REASON_STORAGE_MISMATCH, f"exit code {names.EXIT_STORAGE_MISMATCH}: storage of another base model",
        "Failed at once", "none", "use another claim or subPath, or the base model and revision of before",
    ),
    FailureClass(
        names.FAILURE_STORAGE_FAILED, f"exit code {names.EXIT_STORAGE_FAILED}: the storage failed a write or a read",
        IN_PLACE, "infrastructure", "look at the volume",
    ),
    FailureClass(
        names.FAILURE_START_FAILED, "container `StartError`, `ContainerCannotRun`, exit codes 126 to 128", IN_PLACE,
        "application", "look at spec.image: it is no trainer image, or not one for this node",
    ),
    FailureClass(
        names.FAILURE_KILLED, "exit code above 128: ended by a signal, or by its liveness probe", IN_PLACE, "none", ""
    ),
    FailureClass(
        names.FAILURE_CRASHED, "any other exit code but 0", IN_PLACE, "application", "read the log of the pod"
    ),
)  # fmt: skip
"""The container ended, and the pod with its devices is kept."""

WAITING = (
    FailureClass(
        names.REASON_IMAGE_UNAVAILABLE, "container `ErrImagePull`, `ImagePullBackOff`, `InvalidImageName`", WAITS,
        "none", "look at spec.image and spec.pod.imagePullSecrets",
    ),
    FailureClass(
        names.REASON_CONTAINER_INVALID, "container `CreateContainerConfigError`, `CreateContainerError`", WAITS, "none",
        "look at the Secrets and ConfigMaps that spec.pod names",
    ),
    FailureClass(
        names.REASON_MOUNT_FAILED, "events `FailedMount`, `FailedAttachVolume`, `FailedMapVolume`", WAITS, "none",
        "look at the volume and its driver on the node",
    ),
    FailureClass(
        names.REASON_UNSCHEDULABLE, "the scheduler finds no node", "waits; Failed after "
        "`deadlines.unschedulableSeconds`, and what is missing is named", "none",
        "make room, or ask for less in spec.workers.resources and spec.pod",
    ),
    FailureClass(
        names.REASON_STORAGE_ERROR, "the trainer reports storage that is full, over quota or read-only",
        "the pod is kept, nothing new is acknowledged; goes on by itself", "none", "make room on the volume",
    ),
)  # fmt: skip
"""Nothing ended; something is waited for. A pod that does not serve is Failed after `deadlines.startupSeconds`."""

CLASSES = {row.reason: row for row in (*REPLACED, *IN_POD, *WAITING)}


def budget_of(reason: str) -> Budgeted:
    """Which budget a failure of this class uses; what somebody asked for uses none."""
    return CLASSES[reason].budget if reason in CLASSES else "none"


def remedy(reason: str) -> str:
    """What a person can do about it, to be appended to a message."""
    return f"; {CLASSES[reason].remedy}" if reason in CLASSES and CLASSES[reason].remedy else ""


HEAD = """<!-- Generated by `python -m everloop_operator.core.failure_classes`. Do not edit. -->
# Failures

What can end an attempt of a TrainingSession, or keep it from serving; by what each is recognised, what is done, and
what a person can do. The class is the reason in `status.recoveries`, `status.failure`, conditions and events, where
`NodeHealth` is told as `NodeUnhealthy`. Two more recoveries end no attempt and use no budget: `EngineLost` (event
`EngineRecovered`) and `ServerRestarted` (event `ServerRecovered`), where a process of the pod was lost and another has
taken its place.

Two budgets are counted on the object, in windows that refill: `spec.recovery.infrastructure` for what happens to nodes
and pods, `spec.recovery.application` for what the session does to itself. Where one is used up the session is Failed,
and the condition Stalled names cause and remedy; when enough has left the window it goes on by itself. Preemption,
drains, deletions and changes of the spec use neither.

Where the next attempt is made after a pause, that is 2, 4, 8 seconds and so on, up to 60, with each failure within ten
minutes. Where it is made elsewhere, the node is avoided for this session only, for `spec.recovery.avoidSeconds`, as
long as others have room.

A server that does not answer the operator ends no attempt: after 10 seconds of it the session counts as one that does
not serve. Silence at a time when the operator itself is short of CPU counts for nothing.
"""


def _rows(classes: Iterable[FailureClass]) -> Iterable[str]:
    yield "| class | signs | what is done | budget | remedy |"
    yield "|---|---|---|---|---|"
    for row in classes:
        action = row.action + (", after a pause" if row.backs_off else "") + (", elsewhere" if row.shuns_node else "")
        yield f"| `{row.reason}` | {row.signs} | {action} | {row.budget} | {row.remedy} |"


def page() -> str:
    """The whole of docs/failures.md."""
    parts = (
        ("An attempt is over, and another takes over from the journal", REPLACED),
        ("The container ended, and the pod with its devices is kept", IN_POD),
        ("Something is waited for", WAITING),
    )
    return HEAD + "".join(f"\n## {title}\n\n" + "\n".join(_rows(rows)) + "\n" for title, rows in parts)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/failures.md").write_text(page())
