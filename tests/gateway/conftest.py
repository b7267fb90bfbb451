"""Fixtures: one API server for all tests of the gateway, and per test what it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gateway.world import GATEWAY_TOKEN, GATEWAY_USER, Cluster, GatewayProcess, Processes, SdkProcess, Tenant
from tests.networks import new_address
from tests.operator import control_plane


@pytest.fixture
def address() -> Callable[[], str]:
    """Addresses of 127/8 that nobody else uses."""
    return new_address


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The API server with CRD, RBAC, master key and catalogue."""
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "plane").mkdir()
    with control_plane.running(directory / "plane", (f"{GATEWAY_TOKEN},{GATEWAY_USER},2",), audit=True) as plane:
        cluster = Cluster(plane, directory)
        yield cluster
        cluster.api.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Ends what a test has started."""
    processes = Processes()
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[GatewayProcess]:
    """A gateway that no test harms."""
    processes = Processes()
    yield GatewayProcess(processes, cluster, new_address())
    processes.stop()


@pytest.fixture
def tenant(cluster: Cluster) -> Tenant:
    """A namespace of its own with one TrainingSession that has no pod yet."""
    return cluster.tenant()


@pytest.fixture
def sdk(processes: Processes, cluster: Cluster) -> Callable[..., SdkProcess]:
    """Starts SDK programs."""

    def start(url: str, key: str, scenario: str, base_model: str = "org/small") -> SdkProcess:
        return SdkProcess(processes, url, key, scenario, base_model, cluster.directory / "sdk.log")

    return start
