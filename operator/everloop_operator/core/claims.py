"""The claims of a session: which there are, how they are shared, and what keeps a pod from having them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec

from .aspect import Aspect
from .observed import Claim, Observed, Pod, within
from .volumes import models_claim

FenceMode = Literal["", "SharedPosix", "Exclusive", "NodeLocal"]

OBJECT_MOUNTS = {"s3.csi.aws.com": "Mountpoint for Amazon S3"}
"""CSI drivers that show objects as files: none of them can append, or create a name exclusively by a link."""
MOUNT_FAILURES = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
"""Reasons of a pod's events that tell of its volumes."""
NOTICE_SECONDS = 180.0
"""How long an event explains why a pod does not start: a kubelet repeats it after two minutes at most."""
MOUNT_PATIENCE_SECONDS = 10.0
"""How long a scheduled pod may be without containers before its events are read."""


def wanted(session: str, spec: TrainingSessionSpec) -> dict[str, str]:
    """Field -> name of each claim that the pod mounts."""
    journal = "spec.storage.journal.claim" if spec.storage.journal.claim else "spec.storage.journal.claimTemplate"
    models = "spec.baseModel.source.claim" if spec.base_model.source.claim else "spec.storage.modelCache.claim"
    return {journal: spec.storage.journal.claim_name(session), models: models_claim(spec)}


def journal(observed: Observed, spec: TrainingSessionSpec) -> Claim | None:
    """The journal's claim, as far as it was seen."""
    return observed.claims.get(spec.storage.journal.claim_name(observed.session.name))


def missing(observed: Observed, spec: TrainingSessionSpec) -> bool:
    """Whether the claim that the operator is to make surely does not exist."""
    name = spec.storage.journal.claim_name(observed.session.name)
    return spec.storage.journal.claim_template is not None and observed.claims.get(name, ...) is None


def fence_mode(observed: Observed, spec: TrainingSessionSpec) -> FenceMode:
    """How a replaced pod is kept from writing; '' while the journal's claim is not bound."""
    claim = journal(observed, spec)
    if claim is None or claim.phase != "Bound":
        return ""
    if claim.volume and claim.volume.node_local:
        return "NodeLocal"
    return "SharedPosix" if "ReadWriteMany" in claim.access_modes else "Exclusive"


def unfit(observed: Observed, spec: TrainingSessionSpec) -> str:
    """Why the bound volume can never hold this session's journal; '' if it can, as far as is known."""
    claim = journal(observed, spec)
    if claim is None or claim.phase != "Bound":
        return ""
    what = f'PersistentVolumeClaim "{claim.name}" can not hold the journal'
    if claim.access_modes <= {"ReadOnlyMany"} or (claim.volume and claim.volume.read_only):
        return f"{what}: its volume is read-only"
    if claim.volume and claim.volume.source in OBJECT_MOUNTS:
        return (
            f"{what}: {OBJECT_MOUNTS[claim.volume.source]} ({claim.volume.source}) can not append to a file or create "
            "one exclusively; use a shared file system, and spec.storage.copies for copies in S3"
        )
    if fence_mode(observed, spec) == "NodeLocal" and not spec.storage.allow_node_local:
        return (
            f"{what}: its volume is on a single node, and lost with it; use a shared file system, or set "
            "spec.storage.allowNodeLocal"
        )
    return ""


def judge(observed: Observed, spec: TrainingSessionSpec, pod: Pod | None, storage_error: str) -> Aspect:
    """Condition VolumesReady; `storage_error` is the trainer's own trouble with what is mounted."""
    where = f'in namespace "{observed.session.namespace}"'
    for field, name in wanted(observed.session.name, spec).items():
        what = f'PersistentVolumeClaim "{name}" ({field})'
        if name not in observed.claims:
            return Aspect(None, names.REASON_UNKNOWN, f"{what} could not be read")
        claim = observed.claims[name]
        if claim is None:
            if field.endswith("claimTemplate"):
                return Aspect(False, names.REASON_CLAIM_CREATING, f"{what} is being created")
            return Aspect(False, names.REASON_CLAIM_NOT_FOUND, f"{what} does not exist {where}")
        if claim.phase == "Lost":
            return Aspect(False, names.REASON_CLAIM_LOST, f"{what} has lost its volume")
        if claim.phase != "Bound":
            said = _said(observed, f"PersistentVolumeClaim/{name}")
            return Aspect(False, names.REASON_CLAIM_NOT_BOUND, f"{what} is not bound to a volume yet{said}")
        if claim.deleting:
            return Aspect(False, names.REASON_CLAIM_DELETED, f"{what} is being deleted; it goes with the last pod")
    if why := unfit(observed, spec):
        return Aspect(False, names.REASON_VOLUME_UNFIT, why)
    if failure := _mount_failure(observed, pod):
        return Aspect(False, names.REASON_MOUNT_FAILED, failure)
    if storage_error:
        return Aspect(False, names.REASON_STORAGE_ERROR, f"the storage has trouble: {storage_error}")
    claim = journal(observed, spec)
    unread = claim is not None and claim.volume is None
    note = "; the operator may not read volumes: how they are shared is taken from the claims alone" if unread else ""
    return Aspect(True, names.REASON_AS_EXPECTED, f"all claims are bound{note}")


def recheck(observed: Observed, pod: Pod | None) -> datetime | None:
    """When a pod whose containers do not start is to be looked at again; None if it is not one."""
    if pod is None or not waits_for_volumes(pod):
        return None
    return observed.now + timedelta(seconds=MOUNT_PATIENCE_SECONDS)


def waits_for_volumes(pod: Pod) -> bool:
    """Whether a pod has a node, but its kubelet has not come as far as starting a container."""
    starting = pod.container.waiting_reason in ("", "ContainerCreating", "PodInitializing")
    fetching = pod.fetch.running or pod.fetch.exit_code is not None
    return bool(pod.node) and pod.phase == "Pending" and starting and not fetching and pod.deletion_requested is None


def _mount_failure(observed: Observed, pod: Pod | None) -> str:
    if pod is None or not waits_for_volumes(pod):
        return ""
    notice = observed.notices.get(f"Pod/{pod.name}")
    if notice is None or notice.reason not in MOUNT_FAILURES or not within(observed.now - notice.time, NOTICE_SECONDS):
        return ""
    return f"pod {pod.name} can not mount its volumes on {pod.node}: {notice.reason}: {notice.message}"


def _said(observed: Observed, key: str) -> str:
    notice = observed.notices.get(key)
    return f": {notice.reason}: {notice.message}" if notice else ""
