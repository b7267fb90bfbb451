"""Observations of RLJobs for the tables of the pure tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core.jobs import children
from everloop_operator.core.jobs.observed import Driver, Job, ObservedJob, SeenSession
from everloop_operator.core.jobs.plan import JobPlan, JobSettings, plan
from everloop_operator.core.jobs.report import Point, ProgressReport
from everloop_operator.core.observed import Answer, Container, Pod
from everloop_operator.core.projections import format_time
from tests.operator import builders
from tests.operator.builders import NOW, ago, node

SETTINGS = JobSettings(reader_image="everloop:1", endpoint="http://gateway", node_lost_seconds=2.0)
SPEC: dict[str, Any] = {
    "session": {"ref": {"name": "tuned"}},
    "runner": {"image": "loop:1", "command": ["python", "loop.py"]},
}
TEMPLATE: dict[str, Any] = {"session": {"template": {"spec": builders.SPEC}}}
PATH = "tinker://s-1:train:0/weights/i"


def spec(**changes: Any) -> RLJobSpec:
    return RLJobSpec.model_validate({**SPEC, **changes})


def job(status: RLJobStatus | None = None, **changes: Any) -> Job:
    return Job("team", "poems", "uid-job", 1, False, spec(**changes), status or RLJobStatus())


def seen(owner: str = "", mode: str = "SharedPosix", **changes: Any) -> SeenSession:
    """A session that serves."""
    serving = builders.serving().session
    storage = serving.status.storage
    assert storage is not None
    status = serving.status.model_copy(update={"storage": storage.model_copy(update={"fence_mode": mode})})
    return SeenSession(replace(serving, status=status, **changes), owner)


def idle(on_call: str = "Wake") -> SeenSession:
    """A session that has given its pod back."""
    serving = seen()
    status = serving.session.status.model_copy(update={"phase": "Idle", "conditions": []})
    return replace(
        serving, session=replace(serving.session, spec=builders.spec(idle={"onCall": on_call}), status=status)
    )


def queued() -> SeenSession:
    """A session whose pod waits in line."""
    return replace(seen(), session=builders.session(TrainingSessionStatus(phase="Queued")))


def waiting() -> SeenSession:
    """A session that does not serve yet."""
    return replace(seen(), session=builders.session())


def pod(attempt: int = 1, **changes: Any) -> Pod:
    running = Pod(
        name=f"poems-driver-a{attempt}",
        uid=f"uid-driver-{attempt}",
        attempt=attempt,
        created=ago(100),
        phase="Running",
        node="node-a",
        ip="127.0.0.9",
        ready=True,
        scheduled=ago(90),
        template_hash=children.template_hash(spec()),
    )
    return replace(running, **changes)


def driver(
    attempt: int = 1, resume: Point | None = None, final: ProgressReport | None = None, **changes: Any
) -> Driver:
    return Driver(pod(attempt, **changes), resume or Point(), final=final)


def failed(attempt: int = 1, code: int = 1, output: str = "boom", reason: str = "Error", **changes: Any) -> Driver:
    """A driver whose program ended with an error."""
    container = Container(exit_code=code, exit_reason=reason, exit_message=output)
    return driver(attempt, phase="Failed", ready=False, container=container, **changes)


def report(attempt: int = 1, state: str = "Started", **changes: Any) -> ProgressReport:
    return ProgressReport.model_validate({"state": state, "attempt": attempt, **changes})


def told(iteration: int, attempt: int = 1, **changes: Any) -> ProgressReport:
    """So many iterations, each with a checkpoint."""
    resume = {"iteration": iteration, "checkpoint": f"{PATH}{iteration}"}
    return report(attempt, iteration=iteration, iterations=iteration, resume=resume, **changes)


def observed(**changes: Any) -> ObservedJob:
    """A job that has been told to exist, with a session that serves and one healthy node."""
    base = ObservedJob(now=NOW, job=job(), nodes={"node-a": node()}, session=seen())
    return replace(base, **changes)


def running(attempt: int = 1, iteration: int = 3, status: RLJobStatus | None = None, **changes: Any) -> ObservedJob:
    """A job whose driver runs, as it is just after the status said so; `changes` are of its spec."""
    first = observed(
        job=job(status or RLJobStatus(attempt=attempt, active_since=format_time(ago(100))), **changes),
        drivers=(driver(attempt, template_hash=children.template_hash(spec(**changes))),),
        progress=Answer(report=told(iteration, attempt)),
    )
    return after(first, decided(first))


def decided(observation: ObservedJob) -> JobPlan:
    return plan(observation, SETTINGS)


def status_of(result: JobPlan) -> RLJobStatus:
    assert result.status is not None
    return result.status


def after(observation: ObservedJob, result: JobPlan, **changes: Any) -> ObservedJob:
    """The next observation, once the plan's status is written."""
    return replace(observation, job=replace(observation.job, status=status_of(result)), **changes)


def condition(result: JobPlan, kind: str) -> tuple[str, str, str]:
    found = next(c for c in status_of(result).conditions if c.type == kind)
    return found.status, found.reason, found.message


def variables(result: JobPlan, container: str = "driver") -> dict[str, str]:
    """The environment of a container of the pod that is created."""
    assert result.create_pod is not None
    containers = (*result.create_pod["spec"]["containers"], *result.create_pod["spec"]["initContainers"])
    [found] = [item for item in containers if item["name"] == container]
    return {item["name"]: item.get("value", "") for item in found["env"]}
