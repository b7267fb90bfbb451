"""Claims and the volumes behind them: what the operator makes, what it refuses, and how it says what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core import claims, volumes
from everloop_operator.core.observed import Claim, Notice, Observed, Volume
from everloop_operator.core.projections import newest_notice, volume_of

from .builders import CLAIMS, NOW, ago, condition, decided, observed, pending, session, spec, status_of, text

TEMPLATE = {"storageClassName": "fsx", "accessModes": ["ReadWriteMany"], "size": "1200Gi"}


def templated(**changes: Any) -> dict[str, Any]:
    return {"storage": {"journal": {"claimTemplate": {**TEMPLATE, **changes}}}}


def with_journal(claim: Claim | None, **storage: Any) -> Observed:
    journal = {"claim": {"claimName": "training", "subPath": "everloop"}}
    own = session(storage={"journal": journal, **storage})
    return observed(session=own, claims={**CLAIMS, "training": claim})


def bound(volume: Volume | None, *modes: str) -> Claim:
    access = frozenset(modes or ("ReadWriteMany",))
    return Claim("training", "uid-training", "Bound", access, "pv-1", volume)


# --- the claim that is made -----------------------------------------------------------------------------------------


def test_a_claim_is_made_from_the_template_before_the_pod_that_mounts_it() -> None:
    """Once it is there, it is not made again."""
    first = observed(session=session(**templated()), claims={**CLAIMS, "tuned-journal": None})
    plan = decided(first)
    assert plan.create_claim is not None
    assert plan.create_claim["metadata"]["name"] == "tuned-journal"
    assert plan.create_claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1200Gi"}},
        "storageClassName": "fsx",
    }
    assert condition(plan, names.CONDITION_VOLUMES_READY)[1] == names.REASON_CLAIM_CREATING
    assert plan.create_pod is not None
    [mounted] = [v for v in plan.create_pod["spec"]["volumes"] if v["name"] == "journal"]
    assert mounted["persistentVolumeClaim"] == {"claimName": "tuned-journal"}
    there = replace(first, claims={**CLAIMS, "tuned-journal": bound(None)})
    assert decided(there).create_claim is None


def test_a_claim_that_could_not_be_read_is_not_made() -> None:
    """A moment without an answer is no proof that there is none."""
    assert decided(observed(session=session(**templated()))).create_claim is None


@pytest.mark.parametrize(("when", "owned"), [("Retain", False), ("Delete", True)])
def test_only_a_claim_that_is_to_go_is_owned(when: str, owned: bool) -> None:
    """What owns it takes it along: by default a deleted session leaves its storage."""
    own = session(**templated(whenDeleted=when))
    assert own.spec
    body = volumes.journal_claim(own, own.spec)
    assert body is not None
    assert ("ownerReferences" in body["metadata"]) is owned


def test_the_clusters_default_class_is_asked_for_by_naming_none() -> None:
    """An empty class in a claim would mean: no class at all."""
    own = session(**templated(storageClassName=""))
    assert own.spec
    body = volumes.journal_claim(own, own.spec)
    assert body is not None
    assert "storageClassName" not in body["spec"]


# --- what a volume is fit for ---------------------------------------------------------------------------------------

LUSTRE, LOCAL = Volume("fsx.csi.aws.com"), Volume("local", node_local=True)


@pytest.mark.parametrize(
    ("claim", "mode"),
    [
        (None, ""),
        (Claim("training", "u", "Pending", frozenset({"ReadWriteMany"})), ""),
        (bound(LUSTRE), "SharedPosix"),
        (bound(None), "SharedPosix"),
        (bound(LUSTRE, "ReadWriteOnce"), "Exclusive"),
        (bound(LOCAL, "ReadWriteOnce"), "NodeLocal"),
    ],
)
def test_the_fence_follows_from_the_bound_volume(claim: Claim | None, mode: str) -> None:
    """Without the volume, access modes alone tell."""
    observation = with_journal(claim)
    assert observation.session.spec
    assert claims.fence_mode(observation, observation.session.spec) == mode


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        (bound(Volume("s3.csi.aws.com")), "Mountpoint for Amazon S3"),
        (bound(Volume("fsx.csi.aws.com", read_only=True)), "read-only"),
        (bound(None, "ReadOnlyMany"), "read-only"),
        (bound(LOCAL, "ReadWriteOnce"), "spec.storage.allowNodeLocal"),
    ],
)
def test_a_volume_that_can_not_hold_a_journal_is_refused_with_the_reason(claim: Claim, why: str) -> None:
    """No pod is made that would only crash on it, or lose everything with its node."""
    plan = decided(with_journal(claim))
    assert plan.create_pod is None
    for kind in (names.CONDITION_VOLUMES_READY, names.CONDITION_STALLED):
        _, reason, message = condition(plan, kind)
        assert reason == names.REASON_VOLUME_UNFIT
        assert why in message
        assert '"training"' in message
    assert status_of(plan).phase == names.PHASE_FAILED


def test_a_node_local_volume_is_taken_if_it_is_asked_for_and_never_overruled() -> None:
    """Whoever asks for it knows what is lost; a pod on it is never removed without proof that it is dead."""
    observation = with_journal(bound(LOCAL, "ReadWriteMany"), allowNodeLocal=True)
    plan = decided(observation)
    assert plan.create_pod is not None
    storage = status_of(plan).storage
    assert storage
    assert storage.fence_mode == "NodeLocal"


@pytest.mark.parametrize(
    ("body", "volume"),
    [
        ({"csi": {"driver": "fsx.csi.aws.com"}, "accessModes": ["ReadWriteMany"]}, LUSTRE),
        ({"csi": {"driver": "s3.csi.aws.com"}, "mountOptions": ["read-only"]}, Volume("s3.csi.aws.com", False, True)),
        ({"local": {"path": "/d"}, "accessModes": ["ReadWriteOnce"]}, LOCAL),
        ({"hostPath": {"path": "/d"}, "accessModes": ["ReadWriteOnce"]}, Volume("hostPath", True)),
        ({"hostPath": {"path": "/fsx"}, "accessModes": ["ReadWriteMany"]}, Volume("hostPath")),
        ({"nfs": {"server": "s", "path": "/", "readOnly": True}}, Volume("nfs", False, True)),
    ],
)
def test_volumes_are_read(body: dict[str, Any], volume: Volume) -> None:
    """From the raw object: where it comes from, and whether one node alone has it."""
    assert volume_of({"metadata": {"name": "pv"}, "spec": body}) == volume


def test_a_volume_that_is_bound_to_a_node_is_of_that_node_whatever_it_is() -> None:
    """Provisioners of local disks say so by node affinity."""
    term = {"matchExpressions": [{"key": names.NODE_HOSTNAME_LABEL, "operator": "In", "values": ["node-a"]}]}
    spec_ = {"csi": {"driver": "d"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}
    assert volume_of({"spec": spec_}).node_local
    zone = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z"]}]}
    assert not volume_of({"spec": {**spec_, "nodeAffinity": {"required": {"nodeSelectorTerms": [zone]}}}}).node_local


# --- in the cluster's own words -------------------------------------------------------------------------------------


def test_a_claim_that_does_not_bind_says_why() -> None:
    """The driver's own words, from its event."""
    waiting = Claim("training", "u", "Pending", frozenset({"ReadWriteMany"}))
    notice = Notice("ProvisioningFailed", "subnet-1 has no free addresses", ago(3))
    plan = decided(replace(with_journal(waiting), notices={"PersistentVolumeClaim/training": notice}))
    status, reason, message = condition(plan, names.CONDITION_VOLUMES_READY)
    assert (status, reason) == ("False", names.REASON_CLAIM_NOT_BOUND)
    assert message.endswith("ProvisioningFailed: subnet-1 has no free addresses")


@pytest.mark.parametrize(
    ("notice", "said"),
    [
        (Notice("FailedMount", "MountVolume.SetUp failed: no such file system", ago(5)), True),
        (Notice("FailedMount", "of the day before", ago(86_400)), False),
        (Notice("Pulling", "pulling the image", ago(5)), False),
    ],
)
def test_a_pod_that_can_not_mount_says_why(notice: Notice, said: bool) -> None:
    """Only what is recent and tells of volumes; it is looked at again soon."""
    waiting = pending(node="node-a", scheduled=ago(20))
    plan = decided(observed(pods=(waiting,), notices={f"Pod/{waiting.name}": notice}))
    assert (condition(plan, names.CONDITION_VOLUMES_READY)[1] == names.REASON_MOUNT_FAILED) is said
    assert (notice.message in condition(plan, names.CONDITION_READY)[2]) is said
    assert plan.requeue_after is not None
    assert plan.requeue_after <= claims.MOUNT_PATIENCE_SECONDS


def test_the_newest_event_counts() -> None:
    """Events come in any order, with either of two times."""
    items: list[dict[str, Any]] = [
        {"reason": "Old", "message": "m", "lastTimestamp": text(ago(60))},
        {"reason": "New", "message": "m", "lastTimestamp": None, "eventTime": text(NOW)},
        {"reason": "Timeless", "message": "m"},
    ]
    newest = newest_notice(items)
    assert newest is not None
    assert newest.reason == "New"
    assert newest_notice([]) is None


def test_what_a_claim_is_made_from_is_in_the_spec_alone() -> None:
    """Its name follows from the session's, and two sessions never share one."""
    assert spec(**templated()).storage.journal.claim_name("tuned") == "tuned-journal"
    assert spec().storage.journal.claim_name("tuned") == "training"
