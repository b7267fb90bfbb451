"""Copies in S3 as the operator sees them: what the pod gets, and what the condition says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core import children
from everloop_operator.core.observed import Observed, Trainer
from everloop_trainer.config import SessionConfig

from .builders import SPEC, after, ago, condition, decided, observed, report, serving, session, status_of, text

S3 = {"uri": "s3://team-poems/everloop", "region": "us-west-2"}


def with_copies(**s3: Any) -> dict[str, Any]:
    return {"storage": {**SPEC["storage"], "copies": {"s3": {**S3, **s3}}}}


def reporting(copies: dict[str, Any] | None) -> Observed:
    trainer = Trainer(report=report(copies=copies))
    return replace(serving(), session=session(**with_copies()), trainer=trainer)


def test_the_pod_is_told_where_copies_go_and_given_no_secret_but_a_mount() -> None:
    """Credentials are neither in the configuration nor in the environment."""
    own = session(**with_copies(credentialsSecretName="s3", kmsKeyId="key-1", endpointUrl="https://s3.example.com"))
    assert own.spec
    pod = children.pod(own, own.spec, 1, image="trainer:1", avoid=(), shun=())
    [container] = pod["spec"]["containers"]
    [volume] = [v for v in pod["spec"]["volumes"] if v.get("secret", {}).get("secretName") == "s3"]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"]
    assert "subPath" not in mount  # one with it would never see a rotated Secret
    config = children.trainer_config(own, own.spec, 1)
    assert SessionConfig.model_validate_json(json.dumps(config)).copies is not None  # in the trainer's own words
    assert config["copies"] == {
        "s3": {
            "uri": "s3://team-poems/everloop",
            "region": "us-west-2",
            "endpointUrl": "https://s3.example.com",
            "kmsKeyId": "key-1",
            "credentialsDir": mount["mountPath"],
        }
    }
    assert not [item for item in container["env"] if item["name"].startswith("AWS_")]


def test_without_a_secret_the_pods_own_identity_is_used() -> None:
    """No mount, and the trainer is told of none."""
    own = session(**with_copies())
    assert own.spec
    assert children.trainer_config(own, own.spec, 1)["copies"]["s3"]["credentialsDir"] == ""
    plain = session()
    assert plain.spec
    assert "copies" not in children.trainer_config(plain, plain.spec, 1)


def test_copies_are_part_of_the_attempt() -> None:
    """A pod learns of another place only by being made anew."""
    first, second = session(), session(**with_copies())
    assert first.spec
    assert second.spec
    assert children.template_hash(first.spec) != children.template_hash(second.spec)


@pytest.mark.parametrize(
    ("copies", "status", "reason"),
    [
        ({"pending": 0, "lastTime": "", "error": ""}, "True", names.REASON_AS_EXPECTED),
        ({"pending": 2, "lastTime": "", "error": ""}, "False", names.REASON_COPIES_PENDING),
        ({"pending": 2, "lastTime": text(ago(30)), "error": ""}, "True", names.REASON_AS_EXPECTED),
        ({"pending": 2, "lastTime": text(ago(3600)), "error": ""}, "False", names.REASON_COPIES_PENDING),
        ({"pending": 0, "lastTime": text(ago(3600)), "error": ""}, "True", names.REASON_AS_EXPECTED),
        ({"pending": 0, "lastTime": text(ago(30)), "error": "AccessDenied"}, "False", names.REASON_COPY_FAILED),
        (None, "Unknown", names.REASON_UNKNOWN),
    ],
)
def test_the_condition_says_how_copies_do(copies: dict[str, Any] | None, status: str, reason: str) -> None:
    """Being one snapshot behind is the ordinary state of a session that trains."""
    found = condition(decided(reporting(copies)), names.CONDITION_COPIES_CURRENT)
    assert found[:2] == (status, reason)
    if reason == names.REASON_COPY_FAILED:
        assert found[2] == "AccessDenied"


def test_copies_that_fail_stop_nothing() -> None:
    """The session serves, and is Ready."""
    plan = decided(reporting({"pending": 9, "error": "AccessDenied"}))
    assert status_of(plan).phase == names.PHASE_RUNNING
    assert condition(plan, names.CONDITION_READY)[0] == "True"
    storage = status_of(plan).storage
    assert storage
    assert storage.pending_copies == 9


def test_what_was_said_holds_while_there_is_nobody_to_ask() -> None:
    """A restarted operator, or a session without a pod, changes nothing about the copies."""
    first = reporting({"pending": 1, "lastTime": text(ago(30)), "error": "AccessDenied"})
    silent = after(first, decided(first), trainer=Trainer())
    assert condition(decided(silent), names.CONDITION_COPIES_CURRENT)[1:] == (names.REASON_COPY_FAILED, "AccessDenied")
    storage = status_of(decided(silent)).storage
    assert storage
    assert (storage.pending_copies, storage.last_copy_time) == (1, text(ago(30)))


def test_a_session_without_copies_says_so() -> None:
    """Neither current nor behind."""
    found = condition(decided(observed()), names.CONDITION_COPIES_CURRENT)
    assert found == ("Unknown", names.REASON_NOT_CONFIGURED, "spec.storage.copies is not set")
