"""One local cluster with Everloop installed, shared by all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.world import Everloop, installed


@pytest.fixture(scope="package")
def everloop() -> Iterator[Everloop]:
    """An installation on four nodes, gone afterwards."""
    with installed(nodes=4) as running:
        yield running
