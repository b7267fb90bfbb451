"""What belongs to an RLJob: driver pod, secrets, own session, and what gateway and progress reader make of them."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everloop_gateway import keys
from everloop_operator.api import names, pod_volumes, tokens
from everloop_operator.api.rl_job import SessionTemplate
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.core.jobs import children
from everloop_operator.core.jobs.projections import driver_of
from everloop_operator.core.jobs.report import Point
from everloop_progress.__main__ import task_of
from tests.operator import builders
from tests.operator.full_job import DRIVER_POD
from tests.operator.job_builders import PATH, SPEC, job, seen, spec

PLACE = children.Place("training", "everloop", "http://gateway", "everloop:1")
MASTER = bytes(range(32))
HASH_WITHOUT_ADDITIONS = "66ac7f75ef4277f0"


def built(attempt: int = 3, resume: Point | None = None, shun: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    point = resume or Point(iteration=4, checkpoint=f"{PATH}4")
    return children.pod(job(**changes), spec(**changes), attempt, point, PLACE, shun)


def containers(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    [reader], [driver] = body["spec"]["initContainers"], body["spec"]["containers"]
    return reader, driver


def environment(container: dict[str, Any]) -> dict[str, Any]:
    found = {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}
    assert len(found) == len(container["env"]), "a name twice is refused by server-side apply"
    return found


def test_pod_runs_with_the_least_rights() -> None:
    """The restricted pod security standard for both containers, no service account token, never restarted."""
    body = built()
    assert body["spec"]["automountServiceAccountToken"] is False
    assert body["spec"]["restartPolicy"] == "Never"
    security = body["spec"]["securityContext"]
    assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    for container in containers(body):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_environment_of_the_driver() -> None:
    """The contract of docs/rljob.md, with the key by reference."""
    user = [
        {"name": "WANDB_MODE", "value": "offline"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ]
    given = environment(containers(built(seed=7, runner={**SPEC["runner"], "env": user}))[1])
    assert given == {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "WANDB_MODE": "offline",
        "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token", "optional": False}},
        "TINKER_BASE_URL": "http://gateway",
        "TINKER_API_KEY": {"secretKeyRef": {"name": "poems-driver-a3", "key": "api-key"}},
        "EVERLOOP_STATE_DIR": "/var/lib/everloop/state",
        "EVERLOOP_SEED": "7",
        "EVERLOOP_RESUME_FROM": f"{PATH}4",
        "EVERLOOP_RESUME_ITERATION": "4",
    }


def test_driver_sees_its_own_attempt_only() -> None:
    """Of the claim a directory outside every TrainingSession's; the reader, which makes it, sees the whole."""
    reader, driver = containers(built())
    [state] = [mount for mount in driver["volumeMounts"] if mount["name"] == "journal"]
    assert state["subPath"] == "everloop/team/_jobs/poems-uid-job/a3"
    [storage] = [mount for mount in reader["volumeMounts"] if mount["name"] == "journal"]
    assert (storage["mountPath"], storage["subPath"]) == ("/var/lib/everloop", "everloop")
    assert not [mount for mount in driver["volumeMounts"] if mount["name"] == "token"]


def test_claim_of_which_the_journal_has_all() -> None:
    """Paths without a directory in the place of that which the journal may have on its claim."""
    place = replace(PLACE, sub_path="")
    reader, driver = containers(children.pod(job(), spec(), 3, Point(), place, ()))
    [storage] = [mount for mount in reader["volumeMounts"] if mount["name"] == "journal"]
    assert "subPath" not in storage
    [state] = [mount for mount in driver["volumeMounts"] if mount["name"] == "journal"]
    assert state["subPath"] == "team/_jobs/poems-uid-job/a3"


@pytest.mark.parametrize(("seed", "given"), [(None, None), (0, "0"), (7, "7")])
def test_seed_is_given_if_there_is_one(seed: int | None, given: str | None) -> None:
    """Zero is one."""
    changes: dict[str, Any] = {} if seed is None else {"seed": seed}
    assert environment(containers(built(**changes))[1]).get("EVERLOOP_SEED") == given


def test_what_the_pod_says_of_itself() -> None:
    """Whose it is, which attempt, what it was made from, and that nobody is to move it."""
    metadata = built()["metadata"]
    assert metadata["labels"] == {
        "app.kubernetes.io/name": "everloop",
        "app.kubernetes.io/instance": "poems",
        "app.kubernetes.io/managed-by": "everloop",
        names.LABEL_COMPONENT: names.COMPONENT_DRIVER,
        names.LABEL_JOB: "poems",
        names.LABEL_ATTEMPT: "3",
    }
    assert metadata["annotations"] == {
        names.ANNOTATION_TEMPLATE_HASH: HASH_WITHOUT_ADDITIONS,
        names.ANNOTATION_RESUME: f"4 {PATH}4",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "argocd.argoproj.io/ignore-restart-policy": "true",
    }
    [owner] = metadata["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-job", True, True)


def test_driver_is_evicted_from_a_lost_node_as_told() -> None:
    """After so many seconds; never where the operator sees nodes itself."""

    def limits(evicted_after: int | None) -> set[Any]:
        pod = children.pod(job(), spec(), 3, Point(), replace(PLACE, evicted_after=evicted_after), ())
        return {toleration.get("tolerationSeconds") for toleration in pod["spec"]["tolerations"]}

    assert (limits(None), limits(40)) == ({None}, {40})


def test_token_is_for_the_group_of_the_pod_only() -> None:
    """The reader's own; of the secret, the API key is no file."""
    pod = built()["spec"]
    [token] = [volume for volume in pod["volumes"] if volume["name"] == "token"]
    assert token["secret"]["secretName"] == "poems-driver-a3"
    assert [item["key"] for item in token["secret"]["items"]] == ["token"]
    assert token["secret"]["defaultMode"] == 0o440
    [mount] = [mount for mount in containers(built())[0]["volumeMounts"] if mount["name"] == "token"]
    assert mount["readOnly"] is True
    assert (pod["enableServiceLinks"], containers(built())[0]["startupProbe"]["failureThreshold"]) == (False, 3600)


def test_reader_understands_its_environment() -> None:
    """What the operator writes is what the progress reader reads."""
    start: dict[str, Any] = {"start": {"checkpoint": {"uri": f"{PATH}0"}}}
    task = task_of({k: v for k, v in environment(containers(built(**start))[0]).items() if isinstance(v, str)})
    assert (task.attempt, task.given.iteration, task.given.checkpoint) == (3, 4, f"{PATH}4")
    assert task.job == Path("/var/lib/everloop/team/_jobs/poems-uid-job")
    assert task.start == f"{PATH}0"


def test_driver_waits_for_its_reader() -> None:
    """A sidecar with a startup probe: the kubelet starts the driver after it has succeeded."""
    reader, _ = containers(built())
    assert reader["restartPolicy"] == "Always"
    assert reader["startupProbe"]["httpGet"]["path"] == "/startz"


def test_pod_prefers_nodes_that_are_well() -> None:
    """Those that are not are shunned, not forbidden."""
    body = built(shun=("node-a",))
    [term] = body["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchExpressions"][0]["values"] == ["node-a"]
    assert "affinity" not in built()["spec"]


def test_additions_are_in_the_pod() -> None:
    """Word for word, after what Everloop has there itself; mounts and variables are the driver's alone."""
    before, after = built(), built(runner={**SPEC["runner"], "pod": DRIVER_POD})
    plain, pod = before["spec"], after["spec"]
    for field in ("serviceAccountName", "imagePullSecrets", "nodeSelector", "runtimeClassName", "schedulerName"):
        assert pod[field] == DRIVER_POD[field], field
    identity = ("runAsUser", "runAsGroup", "fsGroup")
    assert [plain["securityContext"][field] for field in identity] == [1000, 1000, 1000]
    assert [pod["securityContext"][field] for field in identity] == [2000, 2000, 3000]
    assert pod["volumes"] == [*plain["volumes"], *DRIVER_POD["volumes"]]
    added = pod["tolerations"][len(plain["tolerations"]) :]
    assert [toleration.get("key") for toleration in added] == [asked.get("key") for asked in DRIVER_POD["tolerations"]]
    (reader, driver), (old_reader, old_driver) = containers(after), containers(before)
    assert driver["volumeMounts"] == [*old_driver["volumeMounts"], *DRIVER_POD["volumeMounts"]]
    assert reader == old_reader
    assert after["metadata"]["labels"] == {**before["metadata"]["labels"], **DRIVER_POD["labels"]}
    assert after["metadata"]["annotations"].items() >= DRIVER_POD["annotations"].items()


def test_every_name_of_ours_is_reserved() -> None:
    """Volumes and mounts of the pod have names that the additions can't take."""
    for volume in built()["spec"]["volumes"]:
        assert volume["name"] in pod_volumes.RESERVED_VOLUMES
    for mount in containers(built())[1]["volumeMounts"]:
        path = mount["mountPath"]
        assert any(path == top or path.startswith(f"{top}/") for top in pod_volumes.RESERVED_MOUNTS), path


def test_absent_additions_change_no_hash() -> None:
    """A new release must not replace drivers that run; nor do defaults that are spelt out, as the API server does."""
    filled = {"serviceAccountName": "", "securityContext": {"runAsUser": 1000, "fsGroup": 1000}}
    for runner in (SPEC["runner"], {**SPEC["runner"], "pod": filled}):
        assert children.template_hash(spec(runner=runner)) == HASH_WITHOUT_ADDITIONS
    longer = {**SPEC["runner"], "terminationGracePeriodSeconds": 10}
    assert children.template_hash(spec(runner=longer)) == "ff9f21143d7bf17a"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"runner": {**SPEC["runner"], "image": "loop:2"}}, False),
        ({"runner": {**SPEC["runner"], "args": ["--fast"]}}, False),
        ({"runner": {**SPEC["runner"], "pod": {"nodeSelector": {"pool": "cpu"}}}}, False),
        ({"seed": 1}, False),
        ({"deadlines": {"progressSeconds": 60}}, True),
        ({"limits": {"maxIterations": 1}}, True),
        ({"goal": {"metric": "reward", "value": "1"}}, True),
        ({"suspend": True, "ttlSecondsAfterFinished": 1}, True),
        ({"recovery": {"application": {"maxAttempts": 1}}}, True),
    ],
)
def test_which_changes_ask_for_another_driver(change: dict[str, Any], same: bool) -> None:
    """Only those that a running driver can't take over."""
    assert (children.template_hash(spec(**change)) == children.template_hash(spec())) == same


def test_pod_tells_what_it_was_given() -> None:
    """Read back from the API server it says attempt, resume point and the reader's last words."""
    body = built()
    words = '{"state": "Started", "attempt": 3, "resume": {"iteration": 6, "checkpoint": "tinker://m/weights/6"}}'
    ended = {"name": "progress", "state": {"terminated": {"exitCode": 0, "message": words}}}
    driver = driver_of(
        {
            **body,
            "metadata": {**body["metadata"], "uid": "u", "creationTimestamp": "2026-05-01T11:00:00Z"},
            "status": {"initContainerStatuses": [ended], "phase": "Failed"},
        }
    )
    assert driver is not None
    assert (driver.pod.attempt, driver.resume) == (3, Point(iteration=4, checkpoint=f"{PATH}4"))
    assert driver.final is not None
    assert driver.final.resume.iteration == 6


# --- credentials ----------------------------------------------------------------------------------------------------


def stored(attempt: int) -> tuple[str, keys.KeyRecord]:
    """The key of an attempt, and what the gateway reads of its Secret."""
    start: dict[str, Any] = {"start": {"checkpoint": {"uri": f"{PATH}0"}}}
    key = tokens.job_key(MASTER, "uid-job", attempt)
    secret = children.key_secret(job(**start), spec(**start), key, "system")
    return key, keys.record_from_secret(secret)


def test_key_of_a_job_opens_the_gateway_for_its_namespace_and_session() -> None:
    """The gateway authenticates it; new models go to the job's session, and the start checkpoint may be read."""
    key, record = stored(1)
    principal = keys.authenticate(key, record, datetime.now(UTC))
    assert principal == keys.Principal("team", keys.key_id_of(key), "rljob:team:poems", "tuned", f"{PATH}0", "uid-job")
    assert record.expires is None


def test_next_attempt_closes_the_key_of_the_one_before() -> None:
    """The id stays, so that checkpoints stay the job's own; the secret part is another."""
    (old, before), (new, record) = stored(1), stored(2)
    assert keys.key_id_of(old) == keys.key_id_of(new) == before.key_id == record.key_id
    with pytest.raises(keys.Unauthorized):
        keys.authenticate(old, record, datetime.now(UTC))
    assert tokens.job_key_id(MASTER, "uid-other") != record.key_id


def test_key_is_derived_and_nowhere_in_the_clear() -> None:
    """Two passes make one key; in the release namespace lies its hash only."""
    key = tokens.job_key(MASTER, "uid-job", 1)
    assert key == tokens.job_key(MASTER, "uid-job", 1)
    secret = children.key_secret(job(), spec(), key, "system")
    assert secret["metadata"]["name"] == keys.secret_name(tokens.job_key_id(MASTER, "uid-job"))
    assert (secret["metadata"]["namespace"], secret["metadata"]["labels"][names.LABEL_JOB_UID]) == ("system", "uid-job")
    for value in secret["data"].values():
        assert key.split("-", 2)[2].encode() not in base64.b64decode(value)


def test_secret_of_a_driver_goes_with_its_job() -> None:
    """Token and key in the tenant's namespace, owned by the job."""
    secret = children.driver_secret(job(), 2, "token-text", "key-text")
    assert secret["metadata"]["ownerReferences"][0]["kind"] == names.RL_JOB_KIND
    assert {k: base64.b64decode(v).decode() for k, v in secret["data"].items()} == {
        "token": "token-text",
        "api-key": "key-text",
    }


def test_session_of_a_template_is_a_session() -> None:
    """Its spec parses, its labels are kept, and it says whose it is."""
    session_spec = seen().session.spec
    assert session_spec is not None
    template = {"metadata": {"labels": {"team": "poems"}}, "spec": session_spec.model_dump(by_alias=True)}
    whole = spec(session={"template": template})
    assert whole.session.template is not None
    assert "annotations" not in children.session(job(), whole.session.template, rests=False)["metadata"]
    body = children.session(job(), whole.session.template, rests=False)
    assert TrainingSessionSpec.model_validate(body["spec"], extra="forbid") == session_spec
    assert body["metadata"]["labels"]["team"] == "poems"
    assert body["metadata"]["labels"][names.LABEL_JOB] == "poems"


@pytest.mark.parametrize(
    ("asked", "rests", "suspended"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_session_of_a_template_rests_with_its_job(asked: bool, rests: bool, suspended: bool) -> None:
    """Or because its template says so; annotations are kept, and labels of ours are not the user's to set."""
    metadata = {"labels": {names.LABEL_JOB: "other"}, "annotations": {"example.com/why": "because"}}
    template = {"metadata": metadata, "spec": {**builders.SPEC, "suspend": asked}}
    parsed = SessionTemplate.model_validate(template)
    body = children.session(job(), parsed, rests=rests)
    assert body["spec"]["suspend"] is suspended
    assert body["metadata"]["annotations"] == {"example.com/why": "because"}
    assert "baseModel" in body["spec"]
    assert "None" not in str(body["spec"])
    assert body["metadata"]["labels"] == {names.LABEL_JOB: "poems", names.LABEL_MANAGED_BY: names.MANAGED_BY}
