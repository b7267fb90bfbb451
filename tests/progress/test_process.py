"""The reader as it runs in a pod: its own process, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from everloop_operator.api.rl_job import GoalSpec
from everloop_operator.cluster.progress import ProgressClient
from everloop_operator.core.jobs.plan import ProgressPoll
from everloop_operator.core.jobs.report import ProgressReport
from everloop_operator.loop.ports import Unanswered
from tests.networks import new_address
from tests.operator.world import ROOT, eventually

IP = new_address()
TOKEN = "ab" * 32


class Process:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job = directory / "job"
        self.words = directory / "words"
        (directory / "token").write_text(TOKEN)

    def start(self, attempt: int = 1, iteration: int = 0, checkpoint: str = "") -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "operator"),
            "POD_IP": IP,
            "EVERLOOP_JOB_DIR": str(self.job),
            "EVERLOOP_ATTEMPT": str(attempt),
            "EVERLOOP_RESUME_FROM": checkpoint,
            "EVERLOOP_RESUME_ITERATION": str(iteration),
            "EVERLOOP_START_FROM": "",
            "EVERLOOP_TOKEN_FILE": str(self.directory / "token"),
            "EVERLOOP_LAST_WORDS": str(self.words),
        }
        self.process = subprocess.Popen([sys.executable, "-m", "everloop_progress"], env=environment)

    def startz(self) -> int:
        try:
            return httpx.get(f"http://{IP}:8082/startz", trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    async def ask(self, token: str = TOKEN, goal: GoalSpec | None = None) -> ProgressReport:
        client = ProgressClient()
        try:
            return await client.ask(ProgressPoll(IP, "u", 1, 1.0, goal), token)
        finally:
            await client.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    process.start()
    yield process
    if process.process.poll() is None:
        process.end(signal.SIGKILL)


async def test_reader_serves_the_operator(reader: Process) -> None:
    """Probe, report, goal, and the same again as last words for who comes too late to ask."""
    eventually("the probe", lambda: reader.startz() == 200)
    lines = [
        {"iteration": n, "reward": -n, "metrics": {"loss": 1 / n}, "checkpoint": f"tinker://m/weights/{n}"}
        for n in (1, 2)
    ]
    (reader.job / "a1" / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = {"iteration": 1, "metrics": {"solved": 0.25}, "time": "2026-05-01T12:00:00Z"}
    (reader.job / "a1" / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
    goal = GoalSpec(metric="eval/solved", value="0.2", consecutive=1)
    report = await reader.ask(goal=goal)
    assert (report.state, report.iteration, report.iterations, report.reward) == ("Started", 2, 2, "-2")
    assert (report.resume.iteration, report.resume.checkpoint) == (2, "tinker://m/weights/2")
    assert report.evaluation is not None
    assert (report.evaluation.metric, report.evaluation.value) == ("solved", "0.25")
    assert report.goal_reached == 1
    assert report.best is not None
    assert report.best.checkpoint == "tinker://m/weights/1"
    assert (await reader.ask(goal=GoalSpec(metric="loss", value="0.1", direction="AtMost"))).goal_reached is None
    assert reader.end() == 0
    words = ProgressReport.model_validate_json(reader.words.read_text())
    assert (words.iteration, words.resume) == (2, report.resume)
    assert len(reader.words.read_text()) < 4096


async def test_reader_holds_a_stale_driver_back(reader: Process) -> None:
    """The probe does not succeed, and the report says what to go on from."""
    eventually("the probe", lambda: reader.startz() == 200)
    (reader.job / "a1" / "progress.jsonl").write_text('{"iteration": 1, "checkpoint": "tinker://m/weights/1"}\n')
    reader.end(signal.SIGKILL)
    reader.start(attempt=2)
    eventually("the probe", lambda: reader.startz() == 503)
    report = await reader.ask()
    assert (report.state, report.resume.checkpoint) == ("Stale", "tinker://m/weights/1")
    assert reader.startz() == 503


async def test_report_wants_the_token(reader: Process) -> None:
    """Nobody else learns anything, whatever they ask."""
    eventually("the probe", lambda: reader.startz() == 200)
    with pytest.raises(Unanswered, match="401"):
        await reader.ask("cd" * 32)
    async with httpx.AsyncClient(base_url=f"http://{IP}:8082", trust_env=False) as client:
        assert (await client.get("/report")).status_code == 401
        assert (await client.get("/report", headers={b"Authorization": b"Bearer \xe9"})).status_code == 401
        assert (await client.get("/../job")).status_code == 404
        assert (await client.post("/report")).status_code == 501
        bad = await client.get("/report?metric=loss&value=much", headers={"Authorization": f"Bearer {TOKEN}"})
        assert bad.status_code == 400
