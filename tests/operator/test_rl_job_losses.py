"""When a driver is over and what that costs, in the cases that are rare: tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import LossStatus, RLJobStatus
from everloop_operator.core.jobs import losses
from everloop_operator.core.jobs.observed import ObservedJob
from everloop_operator.core.jobs.status import dump
from everloop_operator.core.observed import Answer
from tests.operator.builders import NOW, ago, lost, node
from tests.operator.job_builders import after, decided, driver, failed, observed, running, status_of, waiting

OUT_OF_SERVICE = {"node-a": replace(node(), out_of_service=True)}
EVICTED = "Evicted: the node was low on memory"


def used(status: RLJobStatus) -> tuple[int, int]:
    """Of the budgets for infrastructure and application."""
    assert status.budgets is not None
    assert set(dump(status)["budgets"]) == {"infrastructure", "application"}
    return status.budgets.infrastructure.used, status.budgets.application.used


def test_node_that_is_out_of_service_is_lost_at_once() -> None:
    """Whatever it says of itself."""
    status = status_of(decided(replace(running(), nodes=OUT_OF_SERVICE)))
    assert (status.recoveries[-1].reason, used(status)) == ("NodeLost", (1, 0))


@pytest.mark.parametrize(
    ("changes", "force"),
    [
        ({}, False),
        ({"nodes": {"node-a": lost()}}, False),
        ({"nodes": OUT_OF_SERVICE}, True),
        ({"nodes": {}}, True),
        ({"nodes": {}, "nodes_watched": False}, False),
    ],
)
def test_pod_that_is_proved_dead_is_removed_at_once(changes: dict[str, Any], force: bool) -> None:
    """A predecessor that is being deleted: without proof its node has its time, and so has one that can't be seen."""
    base = running(attempt=2)
    leaving = driver(1, deletion_requested=ago(1))
    result = decided(replace(base, drivers=(*base.drivers, leaving), **changes))
    assert [deletion.force for deletion in result.delete_pods if deletion.name.endswith("a1")] == [True] * force


def test_pod_without_a_node_proves_nothing() -> None:
    """It was never bound, and its deletion ends by itself."""
    base = running(attempt=2)
    leaving = driver(1, node="", deletion_requested=ago(1))
    assert decided(replace(base, drivers=(*base.drivers, leaving))).delete_pods == ()


def test_driver_that_ended_well_is_no_loss() -> None:
    """Not even if another one is asked for by now."""
    base = running()
    done = driver(phase="Succeeded", ready=False, template_hash="other")
    assert losses.find(base, 1, done, "wanted", 2.0) is None


def failing(base: ObservedJob, drivers: Any, nodes: Any = None) -> ObservedJob:
    """What is seen one second after a first loss of that kind, when the next one is there and lost as well."""
    first = decided(replace(base, drivers=(drivers(1),), nodes=base.nodes if nodes is None else nodes))
    assert first.create_pod is not None
    later = base.now + timedelta(seconds=1)
    return after(base, first, drivers=(drivers(2),), now=later, nodes=base.nodes if nodes is None else nodes)


@pytest.mark.parametrize(
    ("observation", "waits"),
    [
        (failing(running(), failed), True),
        (failing(running(), lambda attempt: failed(attempt, failure=EVICTED)), True),
        (failing(running(), driver, OUT_OF_SERVICE), False),
        (failing(running(), lambda attempt: driver(attempt, deletion_requested=ago(1))), False),
    ],
)
def test_what_ends_by_itself_backs_off(observation: ObservedJob, waits: bool) -> None:
    """A pod that was taken away is replaced at once, however often; one that fails waits, by its own budget."""
    result = decided(replace(observation, progress=Answer()))
    assert (result.create_pod is None) == waits
    if waits:
        assert result.requeue_after == pytest.approx(1)
        due = replace(observation, now=NOW + timedelta(seconds=2), progress=Answer())
        assert decided(due).create_pod is not None


def test_driver_whose_node_comes_back_before_it_has_a_successor_goes_on() -> None:
    """The loss that waited is forgotten."""
    base = replace(running(), session=waiting())
    result = decided(replace(base, nodes={"node-a": lost()}))
    assert (result.create_pod, status_of(result).loss is None) == (None, False)
    back = decided(after(base, result))
    assert (back.create_pod, status_of(back).phase, status_of(back).loss) == (None, "Running", None)


WAITED = LossStatus(reason="DriverFailed", message="it failed", budget="application")


@pytest.mark.parametrize(
    ("loss", "drivers", "reason", "spent"),
    [
        (None, (driver(2), failed(1)), "DriverFailed", (0, 1)),
        (None, (driver(1), driver(2)), "PodDeleted", (0, 0)),
        (None, (driver(2),), "PodLost", (1, 0)),
        (WAITED, (driver(2),), "DriverFailed", (0, 1)),
    ],
)
def test_cause_of_a_successor_that_the_status_does_not_know(
    loss: LossStatus | None, drivers: Any, reason: str, spent: tuple[int, int]
) -> None:
    """The recorded one, else what is seen of the driver before, whatever is seen of the successor."""
    base = running(iteration=5)
    recorded = base.job.status.model_copy(update={"loss": loss})
    result = decided(replace(base, job=replace(base.job, status=recorded), drivers=drivers, progress=Answer()))
    status = status_of(result)
    assert (result.create_pod, status.attempt) == (None, 2)
    assert (status.recoveries[-1].reason, used(status)) == (reason, spent)


def test_loss_of_a_successor_that_the_status_does_not_know_is_its_own() -> None:
    """The cause that was recorded is that of the driver before."""
    base = running(iteration=5)
    recorded = base.job.status.model_copy(update={"loss": WAITED})
    drivers = (driver(2, deletion_requested=ago(1)),)
    status = status_of(decided(replace(base, job=replace(base.job, status=recorded), drivers=drivers)))
    assert (status.attempt, status.recoveries[-1].reason) == (3, "PodDeleted")


def test_losses_of_a_job_that_never_had_a_driver() -> None:
    """There are none: the first driver is no recovery, and no budget is used."""
    status = status_of(decided(observed()))
    assert (status.recoveries, used(status)) == ([], (0, 0))
