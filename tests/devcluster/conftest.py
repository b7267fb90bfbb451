"""One running cluster of three nodes, and a namespace of its own for every test."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.cluster import Cluster
from tests.devcluster.user import User


@pytest.fixture(scope="package")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests' image names stand for: the Python that runs them, and one that is missing."""
    path = tmp_path_factory.mktemp("images") / "images.json"
    entries = [
        {"match": "missing:*", "pull_error": "manifest unknown"},
        {"match": "python:*", "path": [str(Path(sys.executable).parent)], "env": {"IMAGE": "python"}},
        {"match": "greeter:*", "entrypoint": ["echo", "hello"], "cmd": ["world"]},
    ]
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory for a cluster."""
    path = Path(tempfile.mkdtemp(prefix="everloop-dev-"))
    yield path
    Cluster(path).down()
    shutil.rmtree(path)


@pytest.fixture(scope="package")
def cluster(images: Path) -> Iterator[Cluster]:
    """Three nodes with four pretend GPUs each."""
    path = Path(tempfile.mkdtemp(prefix="everloop-dev-"))
    running = Cluster(path)
    try:
        running.up(nodes=3, gpus=4, images=images)
        yield running
    finally:
        running.down()
        shutil.rmtree(path)


@pytest.fixture
def user(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[User]:
    """A user with a namespace in which only restricted pods are admitted."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50]
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield User(cluster, name)
    cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--now", "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
