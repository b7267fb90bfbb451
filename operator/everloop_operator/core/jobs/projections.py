"""Objects of the API server -> the values of `observed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.projections import container_of, owner_uid, pod_of, session_of, spec_problem

from .observed import Driver, Job, SeenSession
from .report import Point, ProgressReport

Body = Mapping[str, Any]


def job_of(body: Body) -> Job:
    """Never fails: an object that this version can't read becomes a Job with a `problem`."""
    metadata = body["metadata"]
    spec, problem = None, ""
    try:
        spec = RLJobSpec.model_validate(body.get("spec") or {})
    except ValidationError as error:
        problem = spec_problem(error)
    raw = body.get("status") or {}
    try:
        status = RLJobStatus.model_validate(raw)
    except ValidationError:
        # Only a version with other limits can have written it. What matters of it is the attempt, and that it ended.
        attempt, finish = raw.get("attempt"), raw.get("finishTime")
        status = RLJobStatus(
            attempt=attempt if isinstance(attempt, int) else 0, finish_time=finish if isinstance(finish, str) else None
        )
    return Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        status=status,
        problem=problem,
    )


def driver_of(body: Body) -> Driver | None:
    """A driver pod, or None if its labels are not ours."""
    pod = pod_of(body, names.DRIVER_CONTAINER)
    if pod is None:
        return None
    reader = container_of(body.get("status") or {}, names.PROGRESS_CONTAINER)
    return Driver(pod=pod, resume=_resume(body), reader=reader, final=_last_words(reader.exit_message))


def seen_session(body: Body) -> SeenSession:
    """The TrainingSession of a job."""
    suspended = (body.get("spec") or {}).get("suspend") is True
    return SeenSession(session_of(body), owner_uid(body, names.RL_JOB_KIND), suspended)


def _resume(body: Body) -> Point:
    given = body["metadata"].get("annotations", {}).get(names.ANNOTATION_RESUME, "")
    iteration, _, checkpoint = given.partition(" ")
    return Point(iteration=int(iteration), checkpoint=checkpoint) if iteration.isdecimal() else Point()


def _last_words(text: str) -> ProgressReport | None:
    """The report that a progress reader left as the message of its end; None where there is none, or half of one."""
    try:
        return ProgressReport.model_validate_json(text)
    except ValidationError:
        return None
