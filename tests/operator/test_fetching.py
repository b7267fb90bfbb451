"""Base models that come into a cache first: the init container, and what the conditions say meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core import children, claims, fetching, status
from everloop_operator.core.observed import Claim, Container, Pod, Trainer
from everloop_operator.core.projections import pod_of
from everloop_operator.core.report import TrainerReport
from everloop_trainer.config import FetchConfig
from everloop_trainer.fetching.telling import TOKEN_FILE

from .builders import CLAIMS, SPEC, ago, condition, decided, observed, pending, session, status_of
from .builders import spec as make_spec

HUB = {"huggingFace": {"repo": "org/small", "revision": "refs/pr/1", "tokenSecretName": "hub"}}
BUCKET = {"s3": {"uri": "s3://models/small", "credentialsSecretName": "s3-models"}}
CACHE = {"storage": {**SPEC["storage"], "modelCache": {"claim": {"claimName": "model-cache"}}}}
FROM_HUB: dict[str, Any] = {"baseModel": {"name": "base/model", "source": HUB}, **CACHE}
FROM_BUCKET: dict[str, Any] = {"baseModel": {"name": "base/model", "source": BUCKET}, **CACHE}


def built(**spec: Any) -> tuple[dict[str, Any], TrainingSessionSpec]:
    own = session(**spec)
    assert own.spec
    return children.pod(own, own.spec, 1, image="trainer:1", avoid=(), shun=(), evicted_after=None), own.spec


@pytest.mark.parametrize(
    ("spec", "directory", "secret"),
    [
        (FROM_HUB, "/models/huggingface/org--small/refs--pr--1", "hub"),
        (FROM_BUCKET, "/models/s3/", "s3-models"),
    ],
)
def test_the_cache_is_filled_before_the_trainer_reads_it(spec: dict[str, Any], directory: str, secret: str) -> None:
    """One may write to it, the other not; the credentials are a mount of the first alone."""
    pod, parsed = built(**spec, workers={"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": 1}}})
    [fetch], [trainer] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert fetch["args"] == ["fetch"]
    config = FetchConfig.model_validate_json(next(e["value"] for e in fetch["env"] if e["name"] == "EVERLOOP_FETCH"))
    assert config.directory.startswith(directory)
    assert children.trainer_config(session(**spec), parsed, 1)["baseModel"]["path"] == config.directory
    mounts = {mount["mountPath"]: mount for mount in fetch["volumeMounts"]}
    assert "readOnly" not in mounts["/models"]
    assert next(m for m in trainer["volumeMounts"] if m["mountPath"] == "/models")["readOnly"]
    [volume] = [v for v in pod["spec"]["volumes"] if v.get("secret", {}).get("secretName") == secret]
    assert [m["name"] for m in fetch["volumeMounts"]].count(volume["name"]) == 1
    assert volume["name"] not in [m["name"] for m in trainer["volumeMounts"]]
    models = next(v for v in pod["spec"]["volumes"] if v["name"] == "models")
    assert models["persistentVolumeClaim"] == {"claimName": "model-cache"}
    assert fetch["resources"]["limits"] == {"cpu": "2"}
    assert claims.wanted("tuned", parsed)["spec.storage.modelCache.claim"] == "model-cache"
    assert secret not in json.dumps(fetch["env"])


def test_what_the_user_sets_in_the_environment_holds_for_the_fetch_too() -> None:
    """A proxy, or a mirror of the hub."""
    pod, _ = built(**FROM_HUB, pod={"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]})
    [fetch] = pod["spec"]["initContainers"]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example.com"} in fetch["env"]


def test_a_model_on_a_claim_needs_no_fetch() -> None:
    """And the pod is as it was."""
    pod, parsed = built()
    assert "initContainers" not in pod["spec"]
    assert fetching.model_path(parsed) == "/models/base"


def fetching_pod(container: Container) -> Pod:
    return pending(
        node="node-a",
        scheduled=ago(20),
        fetch=container,
        template_hash=children.template_hash(make_spec(**FROM_HUB)),
    )


FAILED = Container(exit_code=1, exit_message="FetchFailed: org/small at main: 401", finished=ago(5), restarts=1)
AGAIN = Container(exit_code=1, exit_message="FetchFailed: came damaged", running=True, restarts=1)


@pytest.mark.parametrize(
    ("container", "reason", "said"),
    [
        (Container(running=True), names.REASON_BASE_MODEL_FETCHING, "everloop-fetch"),
        (AGAIN, names.REASON_BASE_MODEL_FETCHING, "came damaged"),
        (FAILED, names.REASON_BASE_MODEL_FETCH_FAILED, "401"),
        (Container(exit_code=0), names.REASON_BASE_MODEL_LOADING, "not loaded"),
    ],
)
def test_the_condition_says_how_the_fetch_does(container: Container, reason: str, said: str) -> None:
    """In the words of its termination message; nobody takes it for a mount that does not come."""
    cached = {**CLAIMS, "model-cache": Claim("model-cache", "u", "Bound", frozenset({"ReadWriteMany"}))}
    waiting = fetching_pod(container)
    plan = decided(observed(session=session(**FROM_HUB), pods=(waiting,), claims=cached))
    found = condition(plan, names.CONDITION_BASE_MODEL_READY)
    assert found[:2] == ("False", reason)
    assert said in found[2]
    assert not claims.waits_for_volumes(waiting)
    if container.exit_code != 0:
        assert said in condition(plan, names.CONDITION_READY)[2]


def test_how_far_it_is_is_written_seldom() -> None:
    """In steps of 10 %, and what lies between changes no status; what does not change it urgently waits its turn."""

    def at(percent: int, before: TrainingSessionStatus | None = None) -> TrainingSessionStatus:
        fetching = {"percent": percent, "totalBytes": 15_200_000_000}
        answer = Trainer(report=TrainerReport.model_validate({"state": "Fetching", "fetching": fetching}))
        own = session(before, **FROM_HUB)
        waiting = fetching_pod(Container(running=True))
        return status_of(decided(observed(session=own, pods=(waiting,), trainer=answer)))

    begun = at(0)
    said = [at(percent, begun) for percent in range(101)]
    messages = [next(c.message for c in each.conditions if c.type == names.CONDITION_BASE_MODEL_READY) for each in said]
    assert messages[42].endswith("fetches the base model: 40 % of 15.2 GB")
    assert len(set(messages)) == 11
    assert said[40] == at(49, said[40])
    assert not status.urgent(said[40], said[50])


def test_the_operator_may_ask_the_init_container() -> None:
    """By the token that it asks the trainer with, which is a mount and no value."""
    pod, _ = built(**FROM_HUB)
    [fetch] = pod["spec"]["initContainers"]
    variables = {item["name"]: item.get("value") for item in fetch["env"]}
    assert "POD_IP" in variables
    mounts = {mount["name"]: mount for mount in fetch["volumeMounts"]}
    assert (mounts["token"]["mountPath"], mounts["token"]["readOnly"]) == ("/run/secrets/everloop", True)
    assert variables[TOKEN_FILE] == "/run/secrets/everloop/token"


def test_a_fetch_that_fails_again_and_again_is_a_failure() -> None:
    """Its kubelet goes on trying, and the session serves as soon as it succeeds."""
    waiting = fetching_pod(Container(exit_code=1, exit_message="FetchFailed: 404", restarts=3))
    plan = decided(observed(session=session(**FROM_HUB), pods=(waiting,)))
    assert status_of(plan).phase == names.PHASE_FAILED
    assert condition(plan, names.CONDITION_STALLED)[1] == names.REASON_BASE_MODEL_FETCH_FAILED


def test_the_init_container_is_read_from_the_pod() -> None:
    """As the kubelet reports it."""
    body = {
        "metadata": {
            "name": "tuned-a1-0",
            "uid": "u",
            "creationTimestamp": "2026-05-01T12:00:00Z",
            "labels": {names.LABEL_ATTEMPT: "1"},
        },
        "spec": {"nodeName": "node-a"},
        "status": {
            "phase": "Pending",
            "initContainerStatuses": [
                {
                    "name": names.FETCH_CONTAINER,
                    "restartCount": 1,
                    "state": {"running": {"startedAt": "2026-05-01T12:00:00Z"}},
                    "lastState": {"terminated": {"exitCode": 1, "message": "FetchFailed: x"}},
                }
            ],
        },
    }
    pod = pod_of(body)
    assert pod is not None
    assert (pod.fetch.running, pod.fetch.exit_code, pod.fetch.exit_message) == (True, 1, "FetchFailed: x")
