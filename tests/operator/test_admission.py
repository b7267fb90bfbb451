"""What the API server refuses: hundreds of bad objects made from the schema, and each rule between fields."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from everloop_operator.api import crd, names
from tests.operator.full import BUCKET, CLAIM_TEMPLATE, FULL, GOOD, HUB, Path, Schema, places, schema
from tests.operator.full_job import GOOD_JOBS
from tests.operator.malformed import everything, replaced
from tests.operator.world import SESSIONS, Api

Objects = tuple[dict[str, Any], ...]
NAMESPACE = "admission"
OBJECTS = f"{SESSIONS}/namespaces/{NAMESPACE}"
STRICT = "fieldValidation=Strict&dryRun=All"
PATH = f"{OBJECTS}/{names.TRAINING_SESSION_PLURAL}?{STRICT}"
JOBS = f"{OBJECTS}/{names.RL_JOB_PLURAL}?{STRICT}"


@pytest.fixture(scope="module")
def namespace(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api


KINDS = [
    pytest.param(PATH, schema(), GOOD, 600, id=names.TRAINING_SESSION_KIND),
    pytest.param(JOBS, schema(crd.rl_job_crd()), GOOD_JOBS, 100, id=names.RL_JOB_KIND),
]


@pytest.mark.parametrize(("path", "node", "good", "least"), KINDS)
def test_every_malformed_object_is_refused_by_field(
    namespace: Api, capsys: pytest.CaptureFixture[str], path: str, node: Schema, good: Objects, least: int
) -> None:
    """For every field each fault that its schema knows: refused, and the refusal names the field."""
    for body in good:
        namespace.create(path, body)  # what the bad ones are made from is good
    accepted, unnamed = [], []
    malformed = list(everything(node, good))
    for bad in malformed:
        answer = namespace.request("POST", path, bad.body)
        if answer.status_code not in (400, 422):
            accepted.append(f"{bad.field}: {bad.fault}: {answer.status_code}")
        elif bad.field not in answer.json()["message"]:
            unnamed.append(f"{bad.field}: {bad.fault}: {answer.json()['message'][:300]}")
    with capsys.disabled():
        print(f"\n{len(malformed)} malformed objects of kind {good[0]['kind']}")
    assert not accepted
    assert not unnamed
    assert len(malformed) >= least


POD: Path = ("spec", "pod")
VOLUMES: Path = (*POD, "volumes")
MOUNT: Path = (*POD, "volumeMounts", 0)
INIT: Path = (*POD, "initContainers", 0)
KNOWN_MOUNT = {"name": FULL["spec"]["pod"]["volumes"][0]["name"], "mountPath": "/data"}
RESOURCES: Path = ("spec", "workers", "resources")
LIMITS: Path = ("spec", "workers", "resources", "limits")
REQUESTS: Path = ("spec", "workers", "resources", "requests")
MOUNTS = "every name in volumeMounts must be one of volumes"
INIT_MOUNTS = "every name in volumeMounts of initContainers must be one of volumes"
EXACTLY_ONE_VOLUME = "exactly one of configMap, secret, emptyDir, persistentVolumeClaim, projected and csi"
TOLERATION = "a toleration with operator Equal needs a key, one with operator Exists has no value"
TIME_LIMIT = "tolerationSeconds needs a key and effect NoExecute, and is not for the taints of lost nodes"
DEVICES_EQUAL = "a request for devices, such as nvidia.com/gpu, must equal their limit"
LABEL_KEY = "every key must be a name, or a DNS name, `/` and a name"
OWN_VARIABLE = "a variable of this name is set by Everloop"
OWN_VOLUME = "a volume of this name is Everloop's"
OWN_CONTAINER = "a container of this name is Everloop's"
OWN_MOUNT = "this directory is Everloop's or the container runtime's"
OWN_LABEL = "labels that begin with everloop.dev/ or app.kubernetes.io/ are Everloop's"
OWN_ANNOTATION = "annotations of Everloop, and those that lift a container's confinement, are refused"

RULES: list[tuple[Path, Any, str]] = [
    (("metadata", "name"), "n" * 41, "metadata.name must not be longer than 40 characters"),
    (("metadata", "name"), "dotted.name", "metadata.name must consist of lower-case letters, digits and '-'"),
    ((*REQUESTS, "memory"), "9Gi", "a request must not exceed its limit"),
    ((*REQUESTS, "nvidia.com/gpu"), 0, DEVICES_EQUAL),
    ((*REQUESTS, "amd.com/gpu"), 1, DEVICES_EQUAL),
    (RESOURCES, {"requests": {"nvidia.com/gpu": 1}}, DEVICES_EQUAL),
    ((*LIMITS, "aws.amazon.com/neuron"), "500m", "devices, such as nvidia.com/gpu, are counted in whole numbers"),
    (
        ("spec", "storage", "journal", "claimTemplate"),
        CLAIM_TEMPLATE,
        "exactly one of claim and claimTemplate must be set",
    ),
    (("spec", "baseModel", "source", "s3"), BUCKET, "exactly one of claim, huggingFace and s3 must be set"),
    (
        ("spec",),
        {
            **FULL["spec"],
            "baseModel": {"name": "base/model", "source": {"huggingFace": HUB}},
            "storage": {"journal": FULL["spec"]["storage"]["journal"]},
        },
        "spec.storage.modelCache must be set where spec.baseModel.source is huggingFace or s3",
    ),
    (
        (*POD, "terminationGracePeriodSeconds"),
        20,
        "spec.pod.terminationGracePeriodSeconds must be greater than spec.recovery.checkpointDeadlineSeconds",
    ),
    ((*POD, "labels"), {names.LABEL_SESSION: "other"}, OWN_LABEL),
    ((*POD, "labels"), {names.LABEL_MANAGED_BY: "me"}, OWN_LABEL),
    ((*POD, "labels"), {"no key": "x"}, LABEL_KEY),
    ((*POD, "labels"), {"team": "x", "no key": "x"}, LABEL_KEY),
    ((*POD, "labels"), {"team": "x", names.LABEL_SESSION: "other"}, OWN_LABEL),
    ((*POD, "annotations"), {"team": "x", names.ANNOTATION_TEMPLATE_HASH: "x"}, OWN_ANNOTATION),
    ((*POD, "nodeSelector"), {"/pool": "x"}, LABEL_KEY),
    ((*POD, "annotations"), {names.ANNOTATION_TEMPLATE_HASH: "x"}, OWN_ANNOTATION),
    *(
        ((*POD, "annotations"), {f"{begin}trainer": "unconfined"}, OWN_ANNOTATION)
        for begin in (
            "app.kubernetes.io/",
            "container.apparmor.security.beta.kubernetes.io/",
            "container.seccomp.security.alpha.kubernetes.io/",
        )
    ),
    ((*POD, "tolerations", 0), {"operator": "Exists", "value": "x"}, TOLERATION),
    ((*POD, "tolerations", 0), {"operator": "Equal", "value": "x"}, TOLERATION),
    *(
        ((*POD, "tolerations", 0), {"operator": "Exists", "tolerationSeconds": 5, **change}, TIME_LIMIT)
        for change in (
            {"key": "maintenance"},
            {"key": "maintenance", "effect": "NoSchedule"},
            {"effect": "NoExecute"},
            {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},
            {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
        )
    ),
    *(
        ((*POD, "env", 0, "name"), name, OWN_VARIABLE)
        for name in ("EVERLOOP_CONFIG", "PYTHONPATH", "HOME", "NODE_NAME", "POD_IP", "POD_NAME", "POD_UID", "TMPDIR")
    ),
    ((*POD, "env", 1, "valueFrom"), {}, "exactly one of secretKeyRef, configMapKeyRef and fieldRef"),
    ((*POD, "env", 1, "value"), "both", "only one of value and valueFrom"),
    (
        (*POD, "env", 1, "valueFrom", "fieldRef"),
        {"fieldPath": "metadata.name"},
        "exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    ),
    *(
        ((*VOLUMES, 0, "name"), name, OWN_VOLUME)
        for name in ("journal", "models", "token", "run", "tmp", "everloop-new")
    ),
    ((*VOLUMES, 0), {"name": "shm"}, EXACTLY_ONE_VOLUME),
    ((*VOLUMES, 0, "configMap"), {"name": "x"}, EXACTLY_ONE_VOLUME),
    ((*VOLUMES, 0, "csi"), {"driver": "x"}, EXACTLY_ONE_VOLUME),
    (
        (*VOLUMES, 4, "projected", "sources", 0),
        {},
        "exactly one of configMap, secret and serviceAccountToken",
    ),
    (
        (*VOLUMES, 4, "projected", "sources", 0, "secret"),
        {"name": "x"},
        "exactly one of configMap, secret and serviceAccountToken",
    ),
    ((*VOLUMES, 0, "emptyDir"), {"medium": "Memory"}, "an emptyDir with medium Memory needs a sizeLimit"),
    *(
        ((*MOUNT, "mountPath"), path, OWN_MOUNT)
        for path in (
            *(
                "/dev",
                "/dev/shm/x",
                "/models",
                "/models/x",
                "/opt",
                "/opt/everloop",
                "/opt/everloop/x",
                "/proc",
                "/proc/x",
            ),
            *("/run", "/run/x", "/sys", "/sys/x", "/tmp", "/tmp/x", "/var", "/var/cache", "/var/cache/everloop"),
            *(
                "/var/cache/everloop/x",
                "/var/lib",
                "/var/lib/everloop",
                "/var/lib/everloop/x",
                "/var/run",
                "/var/run/x",
            ),
        )
    ),
    ((*MOUNT, "name"), "journal", MOUNTS),
    ((*INIT, "volumeMounts", 0, "name"), "token", INIT_MOUNTS),
    ((*INIT, "volumeMounts"), [KNOWN_MOUNT, {"name": "other", "mountPath": "/other"}], INIT_MOUNTS),
    (POD, {"volumeMounts": [KNOWN_MOUNT]}, MOUNTS),
    (POD, {"initContainers": [{"name": "warm", "image": "i:1", "volumeMounts": [KNOWN_MOUNT]}]}, INIT_MOUNTS),
    ((*INIT, "name"), "trainer", OWN_CONTAINER),
    ((*INIT, "name"), "everloop-fetch", OWN_CONTAINER),
]


@pytest.mark.parametrize(("path", "value", "message"), RULES, ids=[f"{p[-1]}-{n}" for n, (p, _, _) in enumerate(RULES)])
def test_rules_between_fields(namespace: Api, path: Path, value: Any, message: str) -> None:
    """Admission refuses what breaks the rule, in the rule's words."""
    answer = namespace.request("POST", PATH, replaced(FULL, path, value))
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["message"]


@pytest.mark.parametrize("resources", [{"requests": {"cpu": 1}}, {"limits": {"cpu": 1}}, {}])
def test_requests_and_limits_may_be_left_out(namespace: Api, resources: dict[str, Any]) -> None:
    """What compares them has nothing to say then."""
    namespace.create(PATH, replaced(FULL, RESOURCES, resources))


def test_a_directory_on_disk_needs_no_limit(namespace: Api) -> None:
    """One in memory does, as its size counts as the container's own."""
    name = KNOWN_MOUNT["name"]
    namespace.create(PATH, replaced(FULL, (*VOLUMES, 0), {"name": name, "emptyDir": {}}))


def test_every_rule_is_tried() -> None:
    """No rule of the schema is without an object that breaks it; those on changes are tried where changes are."""
    told = {message for _, _, message in RULES}
    for name, _, node, _ in itertools.chain.from_iterable(places(schema(), good) for good in GOOD):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"] in told or "oldSelf" in rule["rule"], f"{name}: {rule['message']}"


HOST_FIELDS = [
    (*POD, "hostNetwork"),
    (*POD, "hostPID"),
    (*POD, "restartPolicy"),
    (*POD, "containers"),
    (*POD, "securityContext", "runAsNonRoot"),
    (*VOLUMES, 0, "hostPath"),
    (*INIT, "securityContext"),
    (*INIT, "ports"),
    (*MOUNT, "mountPropagation"),
]


@pytest.mark.parametrize("path", HOST_FIELDS, ids=lambda path: str(path[-1]))
def test_what_everloop_owns_has_no_field(namespace: Api, path: Path) -> None:
    """Host access, privileges and the pod's own frame can't be named."""
    answer = namespace.request("POST", PATH, replaced(FULL, path, {}))
    assert answer.status_code == 400
    assert re.search(rf'unknown field "spec\.pod\.[^"]*{path[-1]}"', answer.json()["message"])
