"""The release is upgraded, rolled back, uninstalled and installed again while a session trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bootstrap import stage
from demo import install
from tests.acceptance.relay import relay
from tests.e2e.world import Everloop, installed
from tests.prepared import prepared
from tests.soak.leg import Run, compare, start, wait_told
from tests.whole import only_whole

pytestmark = [
    pytest.mark.cluster,
    only_whole,
]

CHART = ("everloop", str(install.CHART), "--namespace", install.RELEASE_NAMESPACE)
ABOUT = ("everloop", "--namespace", install.RELEASE_NAMESPACE)
WAIT = ("--wait", "--timeout", "180s")
OVERLAY = {
    "labels": {"team": "poems"},
    "env": [{"name": "TEAM", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}}],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}],
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    "initContainers": [
        {
            "name": "look",
            "image": stage.TRAINER_IMAGE,
            "command": ["python", "-c", "import pathlib; pathlib.Path('/shared/seen').write_text('yes')"],
            "volumeMounts": [{"name": "shm", "mountPath": "/shared"}],
        }
    ],
    "disruptionBudget": True,
}
"""What a platform might add to the pod; a kubelet has to make it true."""
LOOK = "import os, pathlib; print(pathlib.Path('/dev/shm/seen').read_text(), os.environ['TEAM'])"
RESULTS_BETWEEN = 3
"""How many results the loop is told after each step, before the next is taken."""


def test_a_session_trains_through_the_life_of_a_release(seed: int) -> None:
    """One pod serves all the while, no exception, nothing twice, and the adapter equals that of an unbroken run."""
    with installed(nodes=2, pod=OVERLAY) as everloop:
        tools = everloop.session.tools

        def gateway() -> tuple[str, int]:
            try:
                host, port = install.gateway_url(tools).removeprefix("http://").split(":")
            except RuntimeError as error:
                raise ConnectionRefusedError("there is no Service") from error
            return host, int(port)

        with relay(gateway) as url:
            through = replace(everloop, session=replace(everloop.session, url=url))
            _train_through(through, seed)


def _train_through(everloop: Everloop, seed: int) -> None:
    tools, stop = everloop.session.tools, everloop.directory / "stop"
    before = everloop.session.status()["pod"]
    look = ("-n", everloop.session.namespace, "exec", before["name"], "-c", "trainer", "--", "python", "-c", LOOK)
    assert tools.kube(*look).split() == ["yes", "poems"]

    def helm(*arguments: str) -> None:
        tools.run(tools.helm, *arguments, seconds=240)

    def reinstall() -> None:
        install.install_chart(
            tools,
            operator_image=stage.OPERATOR_IMAGE,
            trainer_image=stage.TRAINER_IMAGE,
            tokenizer=prepared().model,
        )

    steps: list[tuple[str, Callable[[], None]]] = [
        ("helm test", lambda: helm("test", *ABOUT)),
        (
            "upgrade",
            lambda: helm(
                "upgrade", *CHART, "--reuse-values", "--set", "operator.nodeLostSeconds=3,gateway.replicas=3", *WAIT
            ),
        ),
        ("rollback", lambda: helm("rollback", *ABOUT, *WAIT)),
        ("uninstall", lambda: helm("uninstall", *ABOUT, *WAIT)),
        ("install again", reinstall),
        ("helm test again", lambda: helm("test", *ABOUT)),
    ]
    broken = start(everloop, "release", seed, "--until", str(stop))
    try:
        _advance(broken)
        for name, step in steps:
            print(name)
            step()
            if name != "uninstall":  # no gateway, no result
                _advance(broken)
        stop.touch()
        path = broken.finish()
    finally:
        broken.loop.stop()
    status = everloop.session.status()
    assert (status["pod"]["uid"], status["attempt"], status["recoveryCount"]) == (before["uid"], 1, 0)
    done, fault = compare(everloop, broken, path, seed)
    assert fault == ""
    assert done > 0


def _advance(run: Run) -> None:
    wait_told(run, len(run.told()) + RESULTS_BETWEEN)
