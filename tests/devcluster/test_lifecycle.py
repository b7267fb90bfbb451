"""How clusters come and go: side by side, leaving nothing, even when interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devcluster.cluster import Cluster
from devcluster.processes import marked
from devcluster.settings import ClusterError, Layout
from tests.devcluster import manifests
from tests.devcluster.user import User, wait_for


def _mounts_below(root: Path) -> list[str]:
    """Mount points below a directory in any mount namespace of the machine."""
    found = set()
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            points = {line.split()[4] for line in table.read_text().splitlines()}
        except OSError:  # ended meanwhile
            continue
        found |= {point for point in points if Path(point).is_relative_to(root)}
    return sorted(found)


@pytest.mark.cluster
def test_down_leaves_no_process_and_no_mount(cluster: Cluster, root: Path, images: Path) -> None:
    """A second cluster uses other addresses, and takes its pods, processes and mounts with it when it goes."""
    second = Cluster(root)
    second.up(nodes=1, images=images)
    assert not second.settings.octets() & cluster.settings.octets()
    with pytest.raises(ClusterError, match="up already"):
        Cluster(root).up()
    user = User(second, "default")
    wait_for(lambda: "default" in user.kubectl("get", "serviceaccounts"), "the service account")
    user.run(manifests.server("web"))
    pids = second.container_pids("web")
    assert pids
    assert marked(root)
    assert _mounts_below(root)
    second.down()
    assert marked(root) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert _mounts_below(root) == []
    second.down()
    assert cluster.is_node_ready("node-a")


@pytest.mark.cluster
def test_interrupted_up_cleans_up(root: Path) -> None:
    """Ctrl-C in the middle of `up` ends whatever was started."""
    command = [sys.executable, "-m", "devcluster", "up", "--root", str(root), "--nodes", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    up = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (root / "pids" / "etcd").exists(), "the control plane to be started")
    up.send_signal(signal.SIGINT)
    assert "interrupted" in up.communicate(timeout=20)[1]
    assert up.returncode == 130
    assert marked(root) == []
    assert _mounts_below(root) == []


@pytest.mark.cluster
def test_leftovers_of_a_killed_up_go_with_down(root: Path) -> None:
    """What `up` had started when it was killed refuses a second one, and is found and ended by `down`."""
    command = [sys.executable, "-m", "devcluster", "up", "--root", str(root), "--nodes", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as up:
        wait_for(lambda: (root / "pids" / "etcd").exists(), "the control plane to be started")
        up.kill()
    with pytest.raises(ClusterError, match="take it down first"):
        Cluster(root).up()
    Cluster(root).down()
    assert marked(root) == []
    assert _mounts_below(root) == []


@pytest.mark.parametrize("place", ["/var/lib/cluster", "/var/log/cluster", "/run/cluster"])
def test_root_in_a_place_of_the_kubelet_is_refused(place: str) -> None:
    """A root that a kubelet or a container would not see is refused by its name."""
    with pytest.raises(ClusterError, match=place):
        Cluster(place)


def test_root_with_too_long_a_path_is_refused() -> None:
    """A root below which sockets could not be made is refused."""
    with pytest.raises(ClusterError, match="socket"):
        Cluster(Path("/tmp") / ("x" * 90))


def test_command_without_cluster_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`node kill` where no cluster is fails with the directory in the message."""
    from devcluster.__main__ import main

    assert main(["node", "kill", "node-a", "--root", str(root)]) == 1
    assert f"{root}: no cluster here" in capsys.readouterr().err
    assert not Layout(root).settings.exists()
