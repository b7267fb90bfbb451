"""What the operator changes of a session while its pod runs."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api.training_session import CheckpointsSpec
from everloop_operator.cluster.trainer import TrainerClient
from everloop_trainer.adjusted import Adjusted
from everloop_trainer.config import CheckpointsConfig
from everloop_trainer.session.status import AutomaticCheckpoints
from tests.server.pod import TOKEN, Pod, eventually, kill_process, process_of
from tests.server.sdk import SdkProgram, run_command
from tests.server.stub import Stub
from tests.server.test_survival import model_of

CONFIGURED = CheckpointsConfig.model_validate({"everySeconds": 1800, "keepLast": 2})


async def test_a_change_is_in_the_report_and_outlives_the_server(own_pod: Pod, gateway: Stub) -> None:
    """The operator's client tells it, the server is killed, and the next one in the pod takes checkpoints by it."""
    container, client = own_pod.container.pid, TrainerClient()
    told = CheckpointsSpec.model_validate({"everySeconds": 1, "keepLast": 3})
    report = await client.ask(own_pod.ip, TOKEN, checkpoints=told)
    await client.close()
    assert report.checkpoints is not None
    assert (report.checkpoints.every_seconds, report.checkpoints.keep_last) == (1, 3)
    kill_process(process_of(own_pod, "server"))
    status = own_pod.wait_until("Serving")
    assert (status["incarnation"]["boot"], own_pod.container.pid) == (2, container)
    assert status["checkpoints"] == {"everySeconds": 1.0, "keepLast": 3}
    with SdkProgram(gateway.url, "train", seed=5, steps=1000, sequences=8, length=40) as program:
        model = model_of(program)

        def automatic() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = run_command(gateway.url, "checkpoint", "list", "--run-id", model)[
                "checkpoints"
            ]
            return found

        eventually(automatic, "an automatic checkpoint", 60)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "checkpoints"),
        ({"checkpoints": {"everySeconds": -1}}, "checkpoints.everySeconds"),
        ({"checkpoints": {"everySeconds": 1, "keepLast": 0}}, "checkpoints.keepLast"),
        ({"checkpoints": {"everySeconds": 1}, "more": 1}, "more"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(pod: Pod, body: dict[str, Any], field: str) -> None:
    """And nothing of it is taken over."""
    before = pod.status()
    assert before is not None
    answer = pod.request("PUT", "/settings", body)
    assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (400, field)
    after = pod.status()
    assert after is not None
    assert after["checkpoints"] == before["checkpoints"]


def test_only_the_operator_may(pod: Pod) -> None:
    """Without the token of the session nothing is changed."""
    headers = pod.headers | {"Authorization": "Bearer other"}
    answer = pod.request("PUT", "/settings", {"checkpoints": {"everySeconds": 7}}, headers)
    assert answer.status_code == 401


def test_what_is_kept_is_read_by_the_next_server(tmp_path: Path) -> None:
    """Before anything was told the configuration holds, and so it does if what was kept is damaged."""
    file = tmp_path / "settings.json"
    assert Adjusted(file).checkpoints(CONFIGURED) == AutomaticCheckpoints(1800, 2)
    Adjusted(file).remember(AutomaticCheckpoints(0.5, 4))
    assert Adjusted(file).checkpoints(CONFIGURED) == AutomaticCheckpoints(0.5, 4)
    Adjusted(file).remember(AutomaticCheckpoints(0, 1))
    assert Adjusted(file).checkpoints(CONFIGURED) == AutomaticCheckpoints(0, 1)
    file.write_text(json.dumps({"checkpoints": {"everySeconds": 9}})[:-4])
    assert Adjusted(file).checkpoints(CONFIGURED) == AutomaticCheckpoints(1800, 2)


def test_what_cannot_be_kept_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod whose disk is full keeps what it was told before."""
    adjusted = Adjusted(tmp_path / "settings.json")
    adjusted.remember(AutomaticCheckpoints(0.5, 4))

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        adjusted.remember(AutomaticCheckpoints(7, 7))
    assert adjusted.checkpoints(CONFIGURED) == AutomaticCheckpoints(0.5, 4)
