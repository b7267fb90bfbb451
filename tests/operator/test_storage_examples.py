"""Each storage example, as the real API server takes it: every object of the file, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from everloop_operator.api import names
from everloop_operator.core import children, volumes
from everloop_operator.core.projections import session_of, volume_of
from tests.operator.builders import session, spec
from tests.operator.world import Api

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "storage"
FILES = sorted(EXAMPLES.glob("*.yaml"))
NAMESPACE = "team-poems"
GROUPS = {
    "v1": "/api/v1",
    "storage.k8s.io/v1": "/apis/storage.k8s.io/v1",
    names.API_VERSION: f"/apis/{names.API_VERSION}",
}
PLURALS = {
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "StorageClass": "storageclasses",
    "TrainingSession": names.TRAINING_SESSION_PLURAL,
}


@pytest.fixture(scope="module")
def cluster(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def try_out(cluster: Api, body: dict[str, Any]) -> dict[str, Any]:
    """A server dry run with strict validation."""
    scoped = body["kind"] not in ("PersistentVolume", "StorageClass")
    path = f"{GROUPS[body['apiVersion']]}{f'/namespaces/{NAMESPACE}' if scoped else ''}/{PLURALS[body['kind']]}"
    answer = cluster.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", body)
    assert answer.status_code == 201, f"{body['kind']}: {answer.text}"
    created: dict[str, Any] = answer.json()
    return created


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_example_is_taken_by_the_api_server(cluster: Api, path: Path) -> None:
    """And so are the pod and the claim that follow from it."""
    for body in documents(path):
        created = try_out(cluster, body)
        if body["kind"] != names.TRAINING_SESSION_KIND:
            continue
        made = session_of(created)
        assert made.spec is not None, made.problem
        try_out(cluster, children.pod(made, made.spec, 1, image="trainer:1", avoid=(), shun=()))
        claim = volumes.journal_claim(made, made.spec)
        assert (claim is not None) == (path.stem == "fsx-dynamic")
        if claim:
            try_out(cluster, claim)


def test_the_volumes_of_the_examples_are_what_their_files_say() -> None:
    """Lustre is shared; Mountpoint for S3 is recognised as what can not hold a journal."""
    found = {path.stem: volume_of(d) for path in FILES for d in documents(path) if d["kind"] == "PersistentVolume"}
    assert (found["fsx-static"].source, found["fsx-static"].read_only) == ("fsx.csi.aws.com", False)
    assert (found["mountpoint-s3-models"].source, found["mountpoint-s3-models"].read_only) == ("s3.csi.aws.com", True)


def test_the_volume_of_a_bucket_can_be_read_by_the_pods() -> None:
    """One handle for one claim, the bucket by name, files of the pods' own user; nothing in it can be written."""
    [volume] = [d for d in documents(EXAMPLES / "mountpoint-s3-models.yaml") if d["kind"] == "PersistentVolume"]
    [claim] = [d for d in documents(EXAMPLES / "mountpoint-s3-models.yaml") if d["kind"] == "PersistentVolumeClaim"]
    source, options = volume["spec"]["csi"], set(volume["spec"]["mountOptions"])
    # Names of volumes are unique in a cluster, so handles that equal them are too.
    assert source["volumeHandle"] == volume["metadata"]["name"]
    assert volume["metadata"]["name"].startswith(claim["metadata"]["namespace"])
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert source["volumeAttributes"]["bucketName"]
    user = children.pod(session(), spec(), 1, image="trainer:1", avoid=(), shun=())["spec"]["securityContext"]
    assert {"read-only", "allow-other", f"uid={user['runAsUser']}", f"gid={user['runAsGroup']}"} <= options
    assert not {"allow-delete", "allow-overwrite"} & options
