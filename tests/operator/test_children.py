"""The pod and the secret of an attempt, and the trainer's side of what they hold."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core import children
from everloop_operator.core.projections import node_of, owner_uid, pod_of
from everloop_operator.core.report import TrainerReport
from everloop_trainer import exitcodes
from everloop_trainer.config import read_config
from everloop_trainer.session import status as trainer_status
from everloop_trainer.session.work import Work
from tests.operator.builders import NOW, session, spec


def built(attempt: int = 3, avoid: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    return children.pod(session(), spec(**changes), attempt, image="trainer:1", shun=[], avoid=avoid)


def container(body: dict[str, Any]) -> dict[str, Any]:
    [only] = body["spec"]["containers"]
    return dict(only)


def test_pod_runs_with_the_least_rights() -> None:
    """The restricted pod security standard, no service account token, a root file system that can't be written."""
    body = built()
    assert body["spec"]["automountServiceAccountToken"] is False
    assert body["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(body)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pod_outlives_the_judgement_of_others() -> None:
    """Containers restart in place, and no taint evicts the pod: only the operator decides."""
    body = built()
    assert body["spec"]["restartPolicy"] == "Always"
    assert [(t["key"], t["effect"], t.get("tolerationSeconds")) for t in body["spec"]["tolerations"]] == [
        ("node.kubernetes.io/not-ready", "NoExecute", None),
        ("node.kubernetes.io/unreachable", "NoExecute", None),
    ]


def test_mounts() -> None:
    """The journal under its sub path, the model read-only, token and scratch where the trainer expects them."""
    body = built()
    mounts = {mount["mountPath"]: mount for mount in container(body)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in body["spec"]["volumes"]}
    journal = mounts["/var/lib/everloop"]
    assert journal["subPath"] == "everloop"
    assert volumes[journal["name"]]["persistentVolumeClaim"] == {"claimName": "training"}
    assert mounts["/models"]["readOnly"] is True
    assert volumes[mounts["/models"]["name"]]["persistentVolumeClaim"] == {"claimName": "models"}
    assert volumes[mounts["/run/secrets/everloop"]["name"]]["secret"]["secretName"] == "tuned-a3-token"
    assert {"/run/everloop", "/tmp"} < set(mounts)


def test_pod_is_owned_and_labelled() -> None:
    """Names by attempt, labels by which it is found, an owner by which it goes; read back as the same pod."""
    body = built()
    metadata = body["metadata"]
    assert metadata["name"] == "tuned-a3-0"
    assert metadata["labels"][names.LABEL_SESSION] == "tuned"
    assert owner_uid(body) == "uid-session"
    metadata |= {"uid": "u", "creationTimestamp": "2026-05-01T11:00:00Z"}
    pod = pod_of(body)
    assert pod is not None
    assert (pod.attempt, pod.template_hash) == (3, children.template_hash(spec()))


def test_image_of_the_spec_wins() -> None:
    """Empty means the installation's."""
    assert container(built())["image"] == "trainer:1"
    assert container(built(image="own:2"))["image"] == "own:2"


def test_avoided_nodes_are_read_back() -> None:
    """The pod itself remembers which nodes it must not run on."""
    body = built(avoid=("node-a", "node-c"))
    body["metadata"] |= {"uid": "u", "creationTimestamp": "2026-05-01T11:00:00Z"}
    pod = pod_of(body)
    assert pod is not None
    assert pod.avoided_nodes == {"node-a", "node-c"}


@pytest.mark.parametrize(
    ("change", "rebuilds"),
    [
        ({"image": "other"}, True),
        ({"engine": {"threads": 5}}, True),
        ({"workers": {"resources": {"limits": {"cpu": 3}}}}, True),
        ({"adapters": {"maxRank": 8}}, True),
        ({"snapshots": {"replayBudgetSeconds": 3}}, True),
        ({"checkpoints": {"everySeconds": 3}}, False),
        ({"recovery": {"avoidSeconds": 1}}, False),
        ({"deadlines": {"startupSeconds": 99}}, False),
        ({"engine": {"dtype": "Float32", "threads": 2}}, False),
    ],
)
def test_template_hash(change: dict[str, Any], rebuilds: bool) -> None:
    """What a pod is built from changes the hash; what the operator reads itself, and a spelt-out default, do not."""
    assert (children.template_hash(spec(**change)) != children.template_hash(spec())) is rebuilds


def test_token_secret() -> None:
    """Named and labelled by attempt, owned by the session."""
    secret = children.token_secret(session(), 3, "s3cret")
    assert secret["metadata"]["name"] == "tuned-a3-token"
    assert secret["data"] == {"token": "czNjcmV0"}
    assert owner_uid(secret) == "uid-session"


# --- the contract with the trainer ----------------------------------------------------------------------------------


def test_trainer_reads_the_environment_of_the_pod() -> None:
    """Strictly: every field that the operator writes is one that the trainer knows."""
    environment = {item["name"]: item.get("value", "127.0.0.9") for item in container(built())["env"]}
    config = read_config(environment)
    assert (config.session.attempt, config.session.uid) == (3, "uid-session")
    assert config.session.storage.root == "/var/lib/everloop/team/tuned"
    assert config.session.base_model.path == "/models/base"
    assert config.session.token_file == "/run/secrets/everloop/token"
    assert config.grace_seconds == 120
    assert set(json.loads(environment["EVERLOOP_CONFIG"])) == set(
        config.session.model_dump(by_alias=True, exclude_none=True)
    )


def test_operator_reads_the_report_of_the_trainer() -> None:
    """Every field that the operator uses has the trainer's spelling, also before anything has happened."""
    full = trainer_status.SessionStatus(
        state="Serving",
        incarnation=trainer_status.Incarnation(7, 3, 1, "u"),
        lineage="l",
        base_model=trainer_status.BaseModel("base/model", "r", "ab"),
        engine_pid=12,
        engine_restarts=1,
        models=(
            trainer_status.ModelStatus(
                "m-1", "s:train:0", 8, 5, 10, 1, trainer_status.CheckpointStatus("c", 5, "2026-05-01T11:00:00Z", "p", 9)
            ),
        ),
        last_snapshot_time="2026-05-01T11:00:00.123Z",
        storage_error="e",
        replay_mismatches=1,
        recoveries=(trainer_status.Recovery("a3-b1-e2", "EngineLost", "m-1:4", 2, 0, 1.84, "2026-05-01T11:00:00Z"),),
        snapshot_request=("the-rule-5", 2),
        idle_seconds=61.5,
        underway=trainer_status.UnderwayStatus("s:train:0:11", None, 2),
        checkpoints=trainer_status.AutomaticCheckpoints(90.0, 4),
        work=Work(Counter({("optim_step", True): 3, ("sample", False): 1}), 12.5, 0.25),
    )
    read = TrainerReport.model_validate_json(json.dumps(full.to_json()), extra="ignore")
    assert read.incarnation is not None
    assert (read.incarnation.attempt, read.incarnation.pod_uid) == (3, "u")
    assert read.base_model is not None
    assert (read.base_model.revision, read.base_model.manifest_sha256, read.engine.pid) == ("r", "ab", 12)
    [model] = read.models
    assert model.latest_checkpoint is not None
    assert (model.id, model.rank, model.step, model.latest_checkpoint.bytes) == ("m-1", 8, 5, 9)
    [recovery] = read.recoveries
    assert (recovery.resumed_from, recovery.replayed_operations, recovery.seconds) == ("m-1:4", 2, "1.8")
    assert (read.storage.error, read.replay_mismatches) == ("e", 1)
    assert read.snapshot_request is not None
    assert (read.snapshot_request.id, read.snapshot_request.pending) == ("the-rule-5", 2)
    assert read.idle_seconds == 61
    assert read.checkpoints is not None
    assert (read.checkpoints.every_seconds, read.checkpoints.keep_last) == (90, 4)
    assert [(item.kind, item.outcome, item.count) for item in read.work.operations] == [
        ("optim_step", "succeeded", 3),
        ("sample", "failed", 1),
    ]
    assert (read.work.useful_seconds, read.work.replay_seconds) == ("12.500", "0.250")
    fresh = trainer_status.SessionStatus(
        "Starting",
        full.incarnation,
        "l",
        full.base_model,
        None,
        0,
        (),
        "",
        "",
        0,
        (),
        None,
        0.0,
        None,
        full.checkpoints,
    )
    read = TrainerReport.model_validate_json(json.dumps(fresh.to_json()))
    assert (read.last_snapshot_time, read.engine.pid, read.serving, read.snapshot_request) == (None, None, False, None)


def test_exit_codes_are_the_trainers() -> None:
    """Both sides name the same codes."""
    assert names.EXIT_FENCED == exitcodes.FENCED
    assert names.EXIT_STORAGE_MISMATCH == exitcodes.STORAGE_MISMATCH
    assert names.EXIT_STORAGE_FAILED == exitcodes.STORAGE_FAILED


def test_node_is_ready_only_if_it_says_so() -> None:
    """Absent is unknown, never healthy; the time since which it is not Ready is the first that was seen."""
    body = {"metadata": {"name": "n", "uid": "u"}, "spec": {}, "status": {}}
    first = node_of(body, now=NOW)
    assert (first.ready, first.not_ready_since, first.hostname) == (False, NOW, "n")
    later = node_of(body, now=NOW.replace(minute=5), previous=first)
    assert later.not_ready_since == NOW
    other = node_of({**body, "metadata": {"name": "n", "uid": "v"}}, now=NOW.replace(minute=5), previous=first)
    assert other.not_ready_since != NOW


def test_node_that_was_lost_before_the_operator_came_is_not_waited_for_anew() -> None:
    """What the control plane dated counts at first sight, unless it lies ahead of our clock; later only our clock."""

    def body(status: str, minute: int) -> dict[str, Any]:
        ready = {"type": "Ready", "status": status, "lastTransitionTime": NOW.replace(minute=minute).isoformat()}
        return {"metadata": {"name": "n", "uid": "u"}, "spec": {}, "status": {"conditions": [ready]}}

    now = NOW.replace(minute=30)
    assert node_of(body("Unknown", 10), now=now).not_ready_since == NOW.replace(minute=10)
    assert node_of(body("Unknown", 40), now=now).not_ready_since == now
    seen = node_of(body("True", 5), now=NOW.replace(minute=6))
    assert node_of(body("Unknown", 10), now=now, previous=seen).not_ready_since == now
