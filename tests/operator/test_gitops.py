"""An object that Git holds: the operator leaves everything of it alone but the status."""

from __future__ import annotations

import subprocess

import yaml

from everloop_operator.api import names
from tests.operator.control_plane import ControlPlane
from tests.operator.world import ROOT, World, eventually

EXAMPLE = ROOT / "examples" / "trainingsession.yaml"


def test_an_applied_object_shows_no_difference(world: World, plane: ControlPlane) -> None:
    """After the operator has done its work `kubectl diff` finds nothing, and no metadata of the operator's is there."""
    kubeconfig = plane.write_kubeconfig(plane.directory / "gitops.kubeconfig")
    kubectl = [str(plane.directory / "kubectl"), "--kubeconfig", str(kubeconfig), "-n", world.namespace]
    applied = [*kubectl, "apply", "--server-side", "--field-manager", "git", "-f", str(EXAMPLE)]
    subprocess.run(applied, check=True, capture_output=True)
    name = yaml.safe_load(EXAMPLE.read_text())["metadata"]["name"]
    world.claims()
    world.run_pod(f"{name}-a1-0", world.node("a"))
    world.wait_phase(names.PHASE_RUNNING, name)
    diff = subprocess.run(
        [*kubectl, "diff", "--server-side", "--field-manager", "git", "-f", str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (diff.returncode, diff.stdout) == (0, ""), diff.stdout + diff.stderr
    metadata = world.session(name)["metadata"]
    assert not {"annotations", "labels", "finalizers"} & set(metadata)
    writers = {(entry["manager"], entry.get("subresource", "")) for entry in metadata["managedFields"]}
    assert writers == {("git", ""), (names.OPERATOR_FIELD_MANAGER, "status")}


def test_kubectl_waits_for_serving_and_ready(world: World, plane: ControlPlane) -> None:
    """Both waits end as soon as the session serves, and fail in time while it does not."""
    kubeconfig = plane.write_kubeconfig(plane.directory / "waits.kubeconfig")
    kubectl = [str(plane.directory / "kubectl"), "--kubeconfig", str(kubeconfig), "-n", world.namespace]
    wait = [*kubectl, "wait", "tsess/tuned"]
    world.claims()
    world.create_session()
    eventually("a status", world.status)
    first = [*wait, "--for=condition=Serving"]
    assert subprocess.run([*first, "--timeout=1s"], capture_output=True, check=False).returncode != 0
    both = [
        subprocess.Popen([*wait, f"--for=condition={kind}", "--timeout=30s"], stdout=subprocess.DEVNULL)
        for kind in (names.CONDITION_SERVING, names.CONDITION_READY)
    ]
    world.run_pod("tuned-a1-0", world.node("a"))
    assert [process.wait(40) for process in both] == [0, 0]
