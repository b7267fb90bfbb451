"""The journal's claim at a real API server, with the rights that the operator has and no others."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core.plan import CLAIM_RECHECK_SECONDS
from everloop_operator.core.status import SECONDS_BETWEEN_WRITES
from tests.operator.world import World, eventually, stamp

pytestmark = pytest.mark.slow
VOLUMES = "/api/v1/persistentvolumes"
TOLD_SECONDS = 2 * (CLAIM_RECHECK_SECONDS + SECONDS_BETWEEN_WRITES)
"""Claims are looked at so often, and words that change alone are written so seldom."""


def bind(world: World, claim: str, **source: Any) -> None:
    """As the volume controller would: the volume first, then the claim's status."""
    name = f"{world.namespace}-{claim}"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], **source}
    spec["claimRef"] = {"namespace": world.namespace, "name": claim}
    world.api.create(VOLUMES, {"metadata": {"name": name}, "spec": spec})
    path = world.path("persistentvolumeclaims", claim)
    world.api.merge(path, {"spec": {"volumeName": name}})
    world.api.merge(f"{path}/status", {"status": {"phase": "Bound", "accessModes": ["ReadWriteMany"]}})


def wait_volumes(world: World, reason: str) -> str:
    def probe() -> dict[str, Any] | None:
        found = world.condition(names.CONDITION_VOLUMES_READY)
        return found if found.get("reason") == reason else None

    return str(eventually(f"VolumesReady with reason {reason}", probe)["message"])


def test_a_claim_is_made_says_why_it_waits_and_stays_when_the_session_goes(world: World) -> None:
    """From the template to a bound volume that can not hold a journal, each step in the condition."""
    world.claim("models", mode="ReadOnlyMany")
    template = {"accessModes": ["ReadWriteMany"], "size": "1Gi", "storageClassName": "fsx"}
    world.create_session(storage={"journal": {"claimTemplate": template}})
    claim = eventually("the claim", lambda: world.api.get(world.path("persistentvolumeclaims", "tuned-journal")))
    assert claim["spec"]["storageClassName"] == "fsx"
    assert "ownerReferences" not in claim["metadata"]
    world.wait_pod("tuned-a1-0")
    event = {
        "metadata": {"name": "tuned-journal.1"},
        "involvedObject": {
            "kind": "PersistentVolumeClaim",
            "name": "tuned-journal",
            "namespace": world.namespace,
        },
        "type": "Warning",
        "reason": "ProvisioningFailed",
        "message": "subnet-1 has no free addresses",
        "lastTimestamp": stamp(),
    }
    world.api.create(world.path("events"), event)
    eventually(
        "the event's own words",
        lambda: "subnet-1 has no free addresses" in world.condition(names.CONDITION_VOLUMES_READY)["message"],
        TOLD_SECONDS,
    )
    bind(world, "tuned-journal", csi={"driver": "s3.csi.aws.com", "volumeHandle": world.namespace})
    assert "Mountpoint for Amazon S3" in wait_volumes(world, names.REASON_VOLUME_UNFIT)
    assert world.wait_phase("Failed")["storage"]["claimUID"] == claim["metadata"]["uid"]
    world.api.delete(f"{world.sessions_path}/tuned")
    kept = world.api.get(world.path("persistentvolumeclaims", "tuned-journal"))
    assert kept is not None
    assert "deletionTimestamp" not in kept["metadata"]
