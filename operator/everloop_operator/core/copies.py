"""Copies in S3: what the trainer is told of them, and whether they are current."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec

from .aspect import Aspect
from .observed import Observed
from .projections import parse_time
from .volumes import S3_MOUNT

BEHIND_SECONDS = 600.0
"""How long copies may be outstanding without one being made: a large adapter takes minutes."""


def trainer_config(spec: TrainingSessionSpec) -> dict[str, Any] | None:
    """The `copies` of the trainer's configuration; None where there are none. Holds no secret."""
    if spec.storage.copies is None:
        return None
    s3 = spec.storage.copies.s3
    return {
        "s3": {
            "uri": s3.uri,
            "region": s3.region,
            "endpointUrl": s3.endpoint_url,
            "kmsKeyId": s3.kms_key_id,
            "credentialsDir": S3_MOUNT if s3.credentials_secret_name else "",
        }
    }


def judge(observed: Observed, spec: TrainingSessionSpec) -> Aspect:
    """Condition CopiesCurrent. What the trainer last said holds while there is none to ask."""
    if spec.storage.copies is None:
        return Aspect(None, names.REASON_NOT_CONFIGURED, "spec.storage.copies is not set")
    report = observed.trainer.report.copies if observed.trainer.report else None
    if report is None:
        before = (c for c in observed.session.status.conditions if c.type == names.CONDITION_COPIES_CURRENT)
        known = next((c for c in before if c.reason != names.REASON_NOT_CONFIGURED), None)
        if known is None:
            return Aspect(None, names.REASON_UNKNOWN, "no pod has told of them yet")
        return Aspect({"True": True, "False": False}.get(known.status), known.reason, known.message)
    where = spec.storage.copies.s3.uri
    if report.error:
        return Aspect(False, names.REASON_COPY_FAILED, report.error)
    last = parse_time(report.last_time)
    if report.pending and last is None:
        return Aspect(False, names.REASON_COPIES_PENDING, f"the first copies to {where} are being made")
    if report.pending and last and observed.now - last > timedelta(seconds=BEHIND_SECONDS):
        message = f"none was made in {where} for more than {BEHIND_SECONDS:.0f} s, though there is something to copy"
        return Aspect(False, names.REASON_COPIES_PENDING, message)
    return Aspect(True, names.REASON_AS_EXPECTED, f"copies are made in {where}")
