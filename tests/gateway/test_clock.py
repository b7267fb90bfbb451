"""A gateway whose wall clock jumps by days and years: only the API keys go by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.gateway.test_outage import assert_each_once
from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, wait_for
from tests.wall_clock import WallClock

JUMPS = (3.0, -40.0, 4000.0, -400.0)
"""Days away from the true time, one after another."""


def test_a_clock_that_jumps_expires_nothing(
    cluster: Cluster,
    tenant: Tenant,
    processes: Processes,
    address: Callable[[], str],
    sdk: Callable[..., SdkProcess],
    tmp_path: Path,
) -> None:
    """Each jump falls while a step is held and its pod replaced: the loop goes on, and every operation happens once."""
    clock = WallClock(tmp_path)
    gateway = GatewayProcess(processes, cluster, address(), **clock.environment)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    program.wait("created")
    for step, days in enumerate(JUMPS, 1):
        pod.kill()
        tenant.recovering("its node is gone")
        before = len(gateway.logged("call waits"))
        program.say("step")
        gateway.wait_logged("call waits", count=before + 1)
        clock.jump(days)
        pod = tenant.start_pod(processes, address())
        tenant.serve(pod)
        program.wait("step", step, 60)
    program.finish()
    assert_each_once(tenant)


def test_an_api_key_goes_by_the_wall_clock(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Callable[[], str], tmp_path: Path
) -> None:
    """It is refused from the day on that it names, and taken again by a clock that was set right."""
    clock = WallClock(tmp_path)
    gateway = GatewayProcess(processes, cluster, address(), **clock.environment)
    key = cluster.mint_key(tenant.namespace, "--days", "30")
    key.apply()
    with gateway.client(key.text) as client:
        for days, status in ((0, 200), (31, 401), (29, 200), (-400, 200)):
            clock.jump(days)
            wait_for(f"{status} at {days} days", lambda: client.post("/client/config").status_code == status)  # noqa: B023
