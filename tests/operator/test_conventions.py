"""The status of every phase, as kstatus and the Argo CD check of the examples read it: the libraries themselves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.build import go_environment
from everloop_operator.api import names
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.api.training_session_status import RestStatus, TrainingSessionStatus
from everloop_operator.core.node_rules import Severity, Signal
from everloop_operator.core.observed import Container, Observed, Trainer
from tests.operator import job_builders as jobs
from tests.operator.builders import (
    ago,
    decided,
    lost,
    node,
    observed,
    pending,
    pod,
    report,
    serving,
    session,
    status_of,
)

SOURCES = Path(__file__).with_name("kstatus")
ARGO = Path(__file__).resolve().parents[2] / "examples" / "gitops" / "argocd.yaml"


@dataclass(frozen=True)
class Reader:
    """The program of `kstatus/`, with the health checks of the example, one for each kind."""

    binary: Path
    checks: dict[str, Path]

    def read(self, *objects: dict[str, Any]) -> list[tuple[str, str]]:
        """(kstatus, Argo CD's health) of each object; all are of one kind."""
        [check] = {self.checks[body["kind"]] for body in objects}
        lines = "\n".join(json.dumps(body) for body in objects)
        done = subprocess.run([self.binary, check], input=lines, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return [(answer["kstatus"], answer["argo"]) for answer in answers]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = tmp_path_factory.mktemp("kstatus")
    build = ["go", "build", "-trimpath", "-o", str(directory / "kstatus"), "."]
    subprocess.run(build, cwd=SOURCES, env=go_environment(), check=True, capture_output=True)
    [config_map] = [o for o in yaml.safe_load_all(ARGO.read_text()) if o["kind"] == "ConfigMap"]
    checks = {kind: directory / f"{kind}.lua" for kind in (names.TRAINING_SESSION_KIND, names.RL_JOB_KIND)}
    for kind, check in checks.items():
        check.write_text(config_map["data"][f"resource.customizations.health.{names.GROUP}_{kind}"])
    return Reader(directory / "kstatus", checks)


def suspended(observation: Observed, **change: bool) -> Observed:
    """The same, told to have no pod."""
    told = session(observation.session.status, **change)
    return replace(observation, session=replace(told, generation=1))


def histories() -> Iterator[tuple[TrainingSessionStatus, str, str]]:
    """One status for each phase, with what kstatus and Argo CD must make of it."""
    progressing = ("InProgress", "Progressing")
    first = observed()
    yield status_of(decided(first)), *progressing  # Pending
    yield (
        status_of(decided(replace(first, session=session(TrainingSessionStatus(attempt=1)), pods=(pod(),)))),
        *progressing,
    )
    gated = pending(gates=("kueue.x-k8s.io/admission",))
    yield (
        status_of(decided(replace(first, session=session(TrainingSessionStatus(attempt=1)), pods=(gated,)))),
        *progressing,
    )
    running = serving()
    yield status_of(decided(running)), "Current", "Healthy"
    yield status_of(decided(replace(running, nodes={"node-a": lost()}))), *progressing  # Recovering
    sick = node(signals=(Signal("r", Severity.MOVE_NOW, "sick", since=ago(5), due=ago(5)),))
    yield status_of(decided(replace(running, nodes={"node-a": sick}))), *progressing  # Moving
    unscheduled = pending(unschedulable_since=ago(7200), unschedulable_message="no room")
    stuck = replace(first, session=session(TrainingSessionStatus(attempt=1)), pods=(unscheduled,))
    yield status_of(decided(stuck)), "Failed", "Degraded"
    leaving = suspended(replace(running, trainer=Trainer(report=report(1, "Starting"))), suspend=True)
    yield status_of(decided(leaving)), *progressing  # Stopping
    yield status_of(decided(suspended(replace(running, pods=()), suspend=True))), "Current", "Suspended"
    yield status_of(decided(suspended(replace(running, pods=()), stop=True))), "Current", "Healthy"
    rest = RestStatus(state="Idle", since="2026-05-01T11:00:00.000Z")
    idle = replace(first, session=session(TrainingSessionStatus(attempt=1, rest=rest)))
    yield status_of(decided(idle)), "Current", "Healthy"


def job_histories() -> Iterator[tuple[RLJobStatus, str, str]]:
    """The same of an RLJob."""
    progressing = ("InProgress", "Progressing")
    running = jobs.running()
    once = jobs.running(recovery={"application": {"maxAttempts": 0}})
    ended = jobs.driver(phase="Succeeded", container=Container(exit_code=0))
    for observation, kstatus, argo in (
        (jobs.observed(), *progressing),  # Pending
        (jobs.observed(session=None), *progressing),
        (jobs.observed(session=jobs.queued()), *progressing),
        (running, "Current", "Healthy"),
        (replace(running, drivers=(jobs.failed(),)), *progressing),  # Recovering
        (replace(running, drivers=(ended,)), "Current", "Healthy"),
        (replace(running, job=replace(running.job, spec=jobs.spec(suspend=True))), "Current", "Suspended"),
        (replace(once, drivers=(jobs.failed(),)), "Failed", "Degraded"),
    ):
        yield jobs.status_of(jobs.decided(observation)), kstatus, argo


def resource(status: TrainingSessionStatus | RLJobStatus, generation: int = 1, **metadata: Any) -> dict[str, Any]:
    is_job = isinstance(status, RLJobStatus)
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RL_JOB_KIND if is_job else names.TRAINING_SESSION_KIND,
        "metadata": {"name": "tuned", "namespace": "team", "generation": generation, **metadata},
        "spec": {},
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def test_every_phase_is_read_as_it_is_meant(reader: Reader) -> None:
    """The table of docs/conventions.md: a status of each phase, judged by cli-utils and by the check of the example."""
    wanted = list(histories())
    phases = [status.phase for status, *_ in wanted]
    assert set(phases) == set(names.PHASES)
    found = reader.read(*(resource(status) for status, *_ in wanted))
    assert list(zip(phases, found, strict=True)) == [(status.phase, (k, argo)) for status, k, argo in wanted]


def test_every_phase_of_a_job_is_read_as_it_is_meant(reader: Reader) -> None:
    """Of an RLJob the conditions are all there, too, in one order."""
    wanted = list(job_histories())
    phases = [status.phase for status, *_ in wanted]
    assert set(phases) == set(names.JOB_PHASES)
    found = reader.read(*(resource(status) for status, *_ in wanted))
    assert list(zip(phases, found, strict=True)) == [(status.phase, (k, argo)) for status, k, argo in wanted]
    listed = [tuple(condition.type for condition in status.conditions) for status, *_ in wanted]
    assert listed == [names.JOB_CONDITION_TYPES] * len(wanted)


@pytest.mark.parametrize(
    "status",
    [status_of(decided(serving())), jobs.status_of(jobs.decided(jobs.running()))],
    ids=["session", "job"],
)
def test_what_was_said_of_an_older_spec_does_not_count(
    reader: Reader, status: TrainingSessionStatus | RLJobStatus
) -> None:
    """A change that the operator has not seen yet, no status at all, and a deletion are no success."""
    changed = resource(status, generation=2)
    fresh = {key: value for key, value in resource(status).items() if key != "status"}
    deleted = resource(status, deletionTimestamp="2026-05-01T12:00:00Z")
    found = reader.read(changed, fresh, deleted)
    assert found[0] == ("InProgress", "Progressing")
    assert found[1][1] == "Progressing"
    assert found[2][0] == "Terminating"
