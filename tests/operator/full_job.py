"""RLJobs in which every field of the spec is set, but for what is the spec of a TrainingSession."""

from __future__ import annotations

from typing import Any

from everloop_operator.api import names
from everloop_operator.api.pod_overlay import PodAdditions
from tests.operator import builders
from tests.operator.full import ENVIRONMENT, OVERLAY

DRIVER_POD = {str(field.alias): OVERLAY[str(field.alias)] for field in PodAdditions.model_fields.values()}
"""What of a session's overlay a driver may have too."""

JOB: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": names.RL_JOB_KIND,
    "metadata": {"name": "full"},
    "spec": {
        "runtime": "Session",
        "session": {
            "template": {
                "metadata": {"labels": {"team": "poems"}, "annotations": {"example.com/why": "because"}},
                "spec": builders.SPEC,
            }
        },
        "start": {"checkpoint": {"uri": "tinker://s-1:train:0/weights/i"}},
        "runner": {
            "image": "loop:1",
            "command": ["python"],
            "args": ["loop.py"],
            "env": ENVIRONMENT,
            "pod": DRIVER_POD,
            "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
            "terminationGracePeriodSeconds": 10,
        },
        "goal": {"metric": "eval/solved", "value": "0.95", "direction": "AtLeast", "consecutive": 2},
        "limits": {"maxIterations": 10, "activeSeconds": 100},
        "deadlines": {"progressSeconds": 600},
        "recovery": {
            "infrastructure": {"maxAttempts": 5, "windowSeconds": 600},
            "application": {"maxAttempts": 2, "windowSeconds": 600},
        },
        "seed": 7,
        "suspend": False,
        "ttlSecondsAfterFinished": 60,
    },
}
ON_ANOTHERS_SESSION: dict[str, Any] = {**JOB, "spec": {**JOB["spec"], "session": {"ref": {"name": "tuned"}}}}
GOOD_JOBS = (JOB, ON_ANOTHERS_SESSION)
"""Between them they have every field."""
