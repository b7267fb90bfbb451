"""A TrainingSession that cannot come up before somebody puts something right: new models are refused and told why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from everloop_operator.api import names
from tests.gateway.test_outage import assert_each_once
from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant

Start = Callable[..., SdkProcess]
MISSING = 'PersistentVolumeClaim "models" (spec.baseModel.source.claim) does not exist in namespace "team"'


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    """One that the operator writes."""
    time = "2030-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}


def lacks_a_claim(tenant: Tenant) -> None:
    """What the operator says of it."""
    conditions = [
        condition(names.CONDITION_VOLUMES_READY, "False", names.REASON_CLAIM_NOT_FOUND, MISSING),
        condition(names.CONDITION_SERVING, "False", names.REASON_CLAIM_NOT_FOUND, MISSING),
    ]
    tenant.set_status(phase=names.PHASE_PENDING, conditions=conditions, pod=None)


def fails(tenant: Tenant) -> None:
    """What the operator says of it."""
    stalled = condition(names.CONDITION_STALLED, "True", names.REASON_STORAGE_MISMATCH, MISSING)
    tenant.set_status(phase=names.PHASE_FAILED, conditions=[stalled], pod=None)


@pytest.mark.parametrize("mistake", [lacks_a_claim, fails])
def test_a_new_model_is_refused_in_the_operators_words(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, sdk: Start, mistake: Callable[[Tenant], None]
) -> None:
    """The SDK raises within seconds, and nothing is bound."""
    mistake(tenant)
    error = sdk(gateway.url, cluster.key(tenant.namespace), "train").wait("error", seconds=60)
    assert error["type"] == "BadRequestError"
    assert f"TrainingSession {tenant.namespace}/{tenant.session}" in error["message"]
    assert MISSING in error["message"].replace("\\", "")
    assert tenant.bindings() == []


@pytest.mark.parametrize("mistake", [lacks_a_claim, fails])
def test_operations_of_a_model_wait_until_it_is_put_right(
    cluster: Cluster,
    gateway: GatewayProcess,
    tenant: Tenant,
    processes: Processes,
    address: Callable[[], str],
    sdk: Start,
    mistake: Callable[[Tenant], None],
) -> None:
    """A number is never refused: the loop goes on once the session does, and new models are taken again."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    key = cluster.key(tenant.namespace)
    program = sdk(gateway.url, key, "train")
    program.wait("created")
    pod.kill()
    mistake(tenant)
    program.say("step")
    gateway.wait_logged("call held", MISSING)
    other = sdk(gateway.url, key, "train")
    assert other.wait("error", seconds=60)["type"] == "BadRequestError"
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step", seconds=60)
    again = sdk(gateway.url, key, "train")
    again.wait("created", seconds=60)
    for each in (program, again):
        each.finish()
    assert_each_once(tenant)
