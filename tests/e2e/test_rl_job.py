"""An RLJob is done though everything is killed under it, and each of its iterations counts once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
import yaml

from demo import install
from everloop_operator.api import names
from tests.e2e.jobs import EXAMPLE, Job, gone_on_from, kill_operator, kill_session, reached, unbroken
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop
from tests.prepared import client_python

pytestmark = pytest.mark.cluster

SEED = 17
GENEROUS = {"maxAttempts": 100, "windowSeconds": 60}
"""More is killed here within a minute than a job should take part in."""
RECOVERY = {"infrastructure": GENEROUS, "application": GENEROUS}
PHASES = ("start", "middle", "end")
VICTIMS = ("driver", "session", "node", "operator")


class Strikes:
    """What can be killed under a job, and what has to be brought back."""

    def __init__(self, everloop: Everloop, job: Job) -> None:
        self._everloop = everloop
        self._job = job
        self._lost: list[str] = []
        self.kinds: dict[str, Callable[[], None]] = {
            "driver": job.kill_driver,
            "session": lambda: kill_session(everloop),
            "node": self._lose_node,
            "operator": lambda: kill_operator(everloop),
        }

    def __call__(self, victim: str) -> None:
        """Kill it as soon as it is there."""

        def struck() -> bool:
            try:
                self.kinds[victim]()
            except (LookupError, RuntimeError):  # down from the strike before
                return False
            return True

        eventually(struck, f"a {victim} to kill", 120, pause=0.2)

    def _lose_node(self) -> None:
        node = self._job.node()
        self._everloop.session.cluster.node_kill(node)
        self._lost.append(node)

    def bring_back(self) -> None:
        """Let lost nodes join again once their driver has a successor elsewhere."""
        for node in self._lost:
            self._job.wait_elsewhere(node)
            self._everloop.session.cluster.node_heal(node)
            self._everloop.session.cluster.wait_node(node, ready=True)
        self._lost.clear()


@pytest.fixture
def struck(everloop: Everloop) -> Iterator[tuple[Job, Strikes]]:
    whole = bool(os.environ.get("EVERLOOP_TEST_WHOLE"))
    iterations = 60 if whole else 12
    arguments = ("--iterations", str(iterations), "--batch", "1", "--length", "24", "--rank", "8", "--pause", "0.3")
    job = Job(everloop, "struck", (*arguments, "--evaluate-every", "4"))
    strikes = Strikes(everloop, job)
    yield job, strikes
    strikes.bring_back()
    job.delete()


def test_job_is_done_though_everything_is_killed(everloop: Everloop, struck: tuple[Job, Strikes], seed: int) -> None:
    """Driver, session, node and operator, at each phase or in turns: completed, counted once, the adapter equal."""
    job, strike = struck
    iterations = int(job.arguments[1])
    if os.environ.get("EVERLOOP_TEST_WHOLE"):
        schedule = [(phase, victim) for phase in PHASES for victim in VICTIMS]
    else:
        victims = random.Random(seed).sample(VICTIMS[:3], 3)
        schedule = [*zip(PHASES, victims, strict=True), ("end", "operator")]
    job.create(recovery=RECOVERY, limits={}, goal=None, seed=SEED)
    done = 0
    for number, (phase, victim) in enumerate(schedule):
        if phase != "start":
            # A strike falls a little later than the one before, and the last ones before the end.
            done = min(iterations - 2, max(done + 1, iterations * number // len(schedule)))
            job.wait_reported(done)
        strike(victim)
        done = job.reported()
        print(f"struck {victim} after iteration {done}")
        strike.bring_back()
    status = job.wait("the end", lambda status: status.get("phase") in ("Completed", "Failed"))
    print([(r["reason"], r["iteration"], r.get("seconds")) for r in status["recoveries"]])
    assert (status["phase"], reached(status), status["progress"]["iterations"]) == ("Completed", iterations, iterations)
    lines, adapter = unbroken(everloop, job.program, job.arguments, SEED)
    counted = job.lines()
    assert [line["iteration"] for line in counted] == list(range(1, iterations + 1))
    assert [line["reward"] for line in counted] == [line["reward"] for line in lines]
    assert job.adapter() == adapter
    location = status["latestCheckpoint"]["location"]
    assert status["session"]["model"] == location.removeprefix("tinker://").partition("/")[0]
    assert gone_on_from(everloop, location) not in ("", status["session"]["model"])


def test_rest_goal_and_failure(everloop: Everloop) -> None:
    """A job rests, goes on where it was, and reaches its goal; one that fails says why, and keeps its secrets."""
    shape = ("--iterations", "1000", "--batch", "1", "--length", "16", "--rank", "8", "--pause", "0.2")
    job, broken = Job(everloop, "resting", shape), Job(everloop, "broken", ())
    tools, own = everloop.session.tools, bool(os.environ.get("EVERLOOP_TEST_WHOLE"))
    template = {"template": {"spec": yaml.safe_load((EXAMPLE.parent / "trainingsession.yaml").read_text())["spec"]}}
    try:
        job.create(goal=None, limits={}, **({"session": template} if own else {}))
        code = "import os; print('key', os.environ['TINKER_API_KEY'], flush=True); raise SystemExit('no reward')"
        runner = {"image": "own-loop:0.1.0", "command": [client_python(), "-c", code]}
        broken.create(runner=runner, recovery={"application": {"maxAttempts": 0}})
        failed = broken.wait("its end", lambda status: status.get("phase") == "Failed")["failure"]
        assert (failed["reason"], failed["exitCode"]) == ("DriverFailed", 1)
        assert failed["logTail"].splitlines() == ["key [hidden]", "no reward"]

        job.wait_reported(2)
        job.patch({"suspend": True})
        resting = job.wait("rest", lambda status: status.get("phase") == "Suspended")
        eventually(lambda: job.pods() == [], "the driver's end", 60)
        if own:
            tools.kube(
                "-n", NAMESPACE, "wait", "--for=jsonpath={.status.phase}=Suspended", "tsess/resting", "--timeout=90s"
            )
        job.patch({"suspend": False})
        # The driver may have saved more before its end than the operator had read: that alone is not going on.
        job.wait("going on", lambda status: "Resumed" in [each["reason"] for each in status["recoveries"]])
        job.wait("more", lambda status: reached(status) > reached(resting) and status["phase"] == "Running")

        job.patch({"goal": {"metric": "loss", "value": "100", "direction": "AtMost", "consecutive": 2}})
        tools.kube("-n", NAMESPACE, "wait", "--for=condition=Complete", "rlj/resting", "--timeout=90s")
        complete = next(c for c in job.status()["conditions"] if c["type"] == "Complete")
        assert complete["reason"] == "GoalReached"
        keys = ("-n", install.RELEASE_NAMESPACE, "secrets", "-l", names.LABEL_JOB_UID)
        eventually(lambda: tools.get(*keys)["items"] == [], "the end of driver and key", 60)
    finally:
        job.delete()
        broken.delete()
    gone = ("-n", NAMESPACE, "get", "tsess", "-o", "name")
    eventually(lambda: "resting" not in tools.kube(*gone), "the session's end", 60)
