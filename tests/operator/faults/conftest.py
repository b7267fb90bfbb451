"""An operator behind the proxy, in the place of the one of the other tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.operator.conftest import OPERATOR_TOKEN
from tests.operator.control_plane import ControlPlane
from tests.operator.faults.proxy import Proxy
from tests.operator.world import Operator, free_address


class Restarted(Operator):
    """An operator that is started again whenever it ends, as a kubelet does."""

    def __init__(self, kubeconfig: Path, log: Path, ip: str) -> None:
        super().__init__(kubeconfig, log, ip)
        self.starts = 0
        self._over = False
        self._watching = threading.Thread(target=self._watch)

    def watch(self) -> None:
        self.start()
        self._watching.start()

    def _watch(self) -> None:
        while not self._over:
            self.wait()
            if not self._over:
                self.launch()

    def launch(self) -> None:
        super().launch()
        self.starts += 1

    def kill(self) -> None:
        assert self._process
        self._process.kill()

    def wait(self) -> None:
        assert self._process
        self._process.wait()

    def end(self) -> None:
        self._over = True
        self.kill()
        self._watching.join()
        self.kill()  # one that was started meanwhile
        self.wait()


@pytest.fixture(scope="module")
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    proxy = Proxy(plane)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def kubeconfig(plane: ControlPlane, proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    away = replace(plane, server=proxy.address)
    return away.write_kubeconfig(tmp_path_factory.mktemp("faults") / "kubeconfig", OPERATOR_TOKEN)


@pytest.fixture(scope="module")
def alone(operator: Operator) -> Iterator[None]:
    """No other operator runs."""
    operator.stop(signal.SIGKILL)
    yield
    operator.start()


@pytest.fixture(scope="module")
def restarted(alone: None, proxy: Proxy, kubeconfig: Path) -> Iterator[Restarted]:
    restarted = Restarted(kubeconfig, kubeconfig.parent / "log", free_address(3))
    restarted.watch()
    proxy.kill = restarted.kill
    yield restarted
    restarted.end()
