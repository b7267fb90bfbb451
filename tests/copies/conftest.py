"""One S3 server for all tests of the copies; each test has a prefix of its own in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.copies.store import Store, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def store(server: Store) -> Iterator[Store]:
    """The server, without faults, and with nothing counted yet."""
    server.fault = None
    server.requests.clear()
    server.blocked.clear()
    yield server
    server.fault = None


@pytest.fixture
def secret(store: Store, tmp_path: Path) -> Path:
    """The mounted credentials."""
    return store.credentials(tmp_path / "secret")
