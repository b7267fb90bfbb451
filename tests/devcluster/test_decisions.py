"""The pure parts: where Services lead, what images say, which addresses are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from devcluster import build
from devcluster.agent.endpoints import named_services, routes
from devcluster.components import components
from devcluster.cri.images import Images, parse_images
from devcluster.settings import (
    ClusterError,
    Layout,
    Node,
    NodeState,
    Settings,
    check_seen_by_kubelets,
    choose_ports,
    free_octet,
)
from devcluster.shim.rootfs import resolve

API_SERVER = ("127.0.0.1", 6443)


def _service(name: str, **spec: Any) -> dict[str, Any]:
    ports = [{"port": 80, "targetPort": "http"}]
    whole = {"clusterIP": "127.96.0.9", "selector": {"app": "web"}, "ports": ports, **spec}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": whole}


def _pod(ip: str, *, ready: bool = True, app: str = "web", namespace: str = "default", **more: Any) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8080}]
    return {
        "metadata": {"name": ip, "namespace": namespace, "labels": {"app": app}, **more},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def _routes(service: dict[str, Any], *pods: dict[str, Any]) -> dict[tuple[str, int], list[tuple[str, int]]]:
    key = f"default/{service['metadata']['name']}"
    return routes({key: service}, {str(i): pod for i, pod in enumerate(pods)}, API_SERVER)


def test_service_leads_to_ready_pods_that_match() -> None:
    """Pods that are unready, terminating, of other labels or of another namespace are left out."""
    pods = [
        _pod("127.11.0.2"),
        _pod("127.11.0.3", ready=False),
        _pod("127.11.0.4", app="other"),
        _pod("127.11.0.5", namespace="other"),
        _pod("127.11.0.6", deletionTimestamp="2026-01-01T00:00:00Z"),
        _pod(""),
    ]
    assert _routes(_service("web"), *pods) == {("127.96.0.9", 80): [("127.11.0.2", 8080)]}


def test_service_may_want_unready_pods() -> None:
    """A Service with publishNotReadyAddresses takes the pods that are not Ready in."""
    service = _service("web", publishNotReadyAddresses=True)
    assert _routes(service, _pod("127.11.0.3", ready=False)) == {("127.96.0.9", 80): [("127.11.0.3", 8080)]}


def test_target_port_by_number_or_left_out() -> None:
    """A numeric target port is taken as it is; without one it is the Service's own port."""
    assert _routes(_service("web", ports=[{"port": 80, "targetPort": 9}]), _pod("127.11.0.2")) == {
        ("127.96.0.9", 80): [("127.11.0.2", 9)]
    }
    assert _routes(_service("web", ports=[{"port": 80}]), _pod("127.11.0.2"))["127.96.0.9", 80] == [("127.11.0.2", 80)]


def test_services_without_address_or_selector_lead_nowhere() -> None:
    """Headless Services and those without selector have no listener, but for the API server's."""
    assert _routes(_service("web", clusterIP="None"), _pod("127.11.0.2")) == {}
    assert _routes(_service("web", selector={}), _pod("127.11.0.2")) == {}
    assert _routes(_service("kubernetes", selector={})) == {("127.96.0.9", 80): [API_SERVER]}


def test_names_of_services() -> None:
    """Only Services with an address have names."""
    services = {"default/b": _service("b"), "default/a": _service("a"), "default/c": _service("c", clusterIP="None")}
    assert [s["name"] for s in named_services(services)] == ["a", "b"]


def test_first_image_that_matches_counts(tmp_path: Path) -> None:
    """Images are found by glob in order; one that nobody configured adds nothing."""
    file = tmp_path / "images.json"
    file.write_text('[{"match": "app:1", "cmd": ["one"]}, {"match": "app:*", "cmd": ["any"]}]')
    images = Images(file)
    assert (images["app:1"].cmd, images["app:2"].cmd, images["other"].cmd) == (["one"], ["any"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a list"),
        ('[{"cmd": []}]', r"images\[0\]: not an object with a field 'match'"),
        ('[{"match": "a"}, {"match": "b", "command": []}]', r"images\[1\]\.command: unknown field"),
        ('[{"match": "a", "cmd": "sh"}]', r"images\[0\]\.cmd: 'sh' is not a list"),
    ],
)
def test_bad_images_are_named(text: str, message: str) -> None:
    """What is wrong in a list of images is said with its place."""
    with pytest.raises(ValueError, match=message):
        parse_images(text)


def test_settings_survive_their_file(tmp_path: Path) -> None:
    """What was written is read, the nodes' states included."""
    nodes = {"node-a": Node("127.10", 4, NodeState.PARTITIONED)}
    settings = Settings("/kube", "/pb", {"etcd": 20001}, 96, nodes)
    layout = Layout(tmp_path)
    layout.write(settings)
    assert layout.read() == settings
    assert layout.settings.stat().st_mode & 0o777 == 0o600


def test_what_runs_on_a_node_is_decided_by_its_state() -> None:
    """Nothing is started on a node that is off or frozen, on a partitioned one its runtime; when stopping nothing."""
    nodes = {
        "a": Node("127.10", 4),
        "b": Node("127.11", 4, NodeState.PARTITIONED),
        "c": Node("127.12", 4, NodeState.OFF),
        "d": Node("127.13", 4, NodeState.FROZEN),
    }
    ports = choose_ports(0, set())
    settings = Settings("/kube", "/pb", ports, 96, nodes)
    layout = Layout(Path("/root-of-it"))
    names = {c.name for c in components(layout, settings)}
    assert {n for n in names if n.startswith(("cri-", "kubelet-"))} - {"cri-streaming"} == {
        "cri-a",
        "kubelet-a",
        "cri-b",
    }
    assert components(layout, Settings("/kube", "/pb", ports, 96, nodes, stopping=True)) == []


def test_only_loopback_addresses_are_listened_on() -> None:
    """No component is given an address outside 127.0.0.0/8."""
    settings = Settings("/kube", "/pb", choose_ports(0, set()), 96, {"a": Node("127.10", 4)})
    for component in components(Layout(Path("/root-of-it")), settings):
        for argument in component.argv:
            assert "0.0.0.0" not in argument.replace("127.96.0.0/16", "")
            assert "--bind-address" not in argument or argument == "--bind-address=127.0.0.1"


def test_free_octets_run_out() -> None:
    """The first free octet is taken; when all are used that is said."""
    assert free_octet(range(10, 13), {10}) == 11
    with pytest.raises(ClusterError, match="no free range"):
        free_octet(range(10, 12), {10, 11})


def test_ports_are_different_and_as_wanted() -> None:
    """Five different ports, the API server's as asked; one that another cluster has is refused."""
    ports = choose_ports(20123, {20124})
    assert ports["kube-apiserver"] == 20123
    assert len(set(ports.values())) == 5
    assert 20124 not in ports.values()
    with pytest.raises(ClusterError, match="20124"):
        choose_ports(20124, {20124})


def test_binaries_must_be_seen_by_kubelets() -> None:
    """A cache in /var/lib is refused, one in /var/cache is not."""
    check_seen_by_kubelets(Path("/var/cache/everloop/kube/x"))
    with pytest.raises(ClusterError, match="EVERLOOP_CACHE"):
        check_seen_by_kubelets(Path("/var/lib/everloop/kube/x"))


def test_go_keeps_its_caches_with_ours_where_it_has_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that can't be written, or none, is no obstacle to a build."""
    monkeypatch.setenv("EVERLOOP_CACHE", str(tmp_path))
    for name in ("GOCACHE", "GOMODCACHE", "GOPATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert "GOCACHE" not in build.go_environment.__wrapped__()
    for home in ("/proc/nowhere", ""):
        monkeypatch.setenv("HOME", home)
        assert build.go_environment.__wrapped__()["GOCACHE"] == str(tmp_path / "go" / "build")


def test_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go would make it below the sources."""
    monkeypatch.setenv("EVERLOOP_CACHE", "cache")
    with pytest.raises(build.BuildError, match="absolute"):
        build.cache_directory()


def test_links_in_a_container_stay_inside(tmp_path: Path) -> None:
    """Absolute links and .. are resolved below the container's root, and circles are refused."""
    (tmp_path / "data").mkdir()
    (tmp_path / "absolute").symlink_to("/data")
    (tmp_path / "up").symlink_to("../../../data")
    (tmp_path / "circle").symlink_to("circle")
    assert resolve(tmp_path, "/absolute/x") == tmp_path / "data/x"
    assert resolve(tmp_path, "/up/x") == tmp_path / "data/x"
    with pytest.raises(Exception, match="too many symbolic links"):
        resolve(tmp_path, "/circle/x")
