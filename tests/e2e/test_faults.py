"""The promise, with real processes killed under a loop of the unmodified SDK."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo import adapters, faults
from demo.loop import Loop, loss_of
from demo.moments import Running, applied_steps
from demo.session import NAME
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop

pytestmark = pytest.mark.cluster

VICTIMS = ("engine", "server", "spare", "pod", "partition", "node")
STEPS_BETWEEN = 4
STEPS = STEPS_BETWEEN * (len(VICTIMS) + 1)


@dataclass(frozen=True)
class Strike:
    """One fault: what was killed, what was running then, incarnation and status before and after."""

    victim: str
    operation: Running
    incarnation: int
    successor: int
    before: dict[str, Any]
    after: dict[str, Any]
    entry: dict[str, Any] | None
    journal_length: int
    words: str
    """What a partitioned pod logged."""


@dataclass(frozen=True)
class Story:
    """The broken run and the unbroken one, with all that the tests look at."""

    strikes: dict[str, Strike]
    journal: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    broken: dict[str, adapters.Tensor]
    initial: dict[str, adapters.Tensor]
    unbroken: dict[str, adapters.Tensor]
    describe: str


def newest_incarnation(journal: list[dict[str, Any]]) -> int:
    """Number of the newest incarnation that opened a journal."""
    return max(int(record["n"]) for record in journal if record["t"] == "open")


def strike(everloop: Everloop, loop: Loop, victim: str, kind: str, after: int) -> Strike:
    """Kill ``victim`` while an operation of ``kind`` numbered above ``after`` runs, and wait for its recovery."""
    before = everloop.session.status()
    pod, node = before["pod"]["name"], before["pod"]["node"]
    pids = everloop.session.pids(pod)
    loop.say("go on")
    operation = faults.hold(everloop.session.journal, pids, kind, after)
    journal = everloop.session.journal()
    incarnation = newest_incarnation(journal)
    match victim:
        case "pod":
            # A deletion alone would let the server finish what it runs: the container dies first.
            faults.kill(pids, "supervisor", operation.engine)
            everloop.session.tools.kube("-n", NAMESPACE, "delete", "pod", pod, "--grace-period=0", "--force")
        case "partition":
            everloop.session.cluster.node_partition(node)
            # Held until another pod has taken over, and then let go: it has a result to write.
            faults.send(pids, "server", operation.engine, signal.SIGSTOP)
        case "node":
            everloop.session.cluster.node_kill(node)
        case _:
            faults.kill(pids, victim, operation.engine)
    if victim in ("server", "spare", "partition"):
        faults.send(pids, "engine", operation.engine, signal.SIGCONT)
    known = {entry["id"] for entry in before.get("recoveries", [])}

    def entry() -> dict[str, Any] | None:
        fresh = [
            e for e in everloop.session.status().get("recoveries", []) if e["id"] not in known and e.get("seconds")
        ]
        return fresh[-1] if fresh else None

    # A spare's death costs the training nothing, so it is no recovery.
    found = None if victim == "spare" else eventually(entry, f"recovery from the loss of the {victim}", seconds=120)
    everloop.session.wait_serving()
    words = ""
    if victim == "partition":
        assert faults.processes(pids), "the partitioned pod lives on"
        faults.send(pids, "server", operation.engine, signal.SIGCONT)
        eventually(lambda: not faults.processes(pids), "the end of the fenced zombie", seconds=30)
        logs = (everloop.session.cluster.root / "nodes" / node / "logs").glob(f"{NAMESPACE}_{pod}_*/**/*.log")
        words = "\n".join(log.read_text() for log in logs)
    successor = newest_incarnation(everloop.session.journal())
    return Strike(
        victim, operation, incarnation, successor, before, everloop.session.status(), found, len(journal), words
    )


def steps_of(loop: Loop) -> Iterator[int]:
    """Yield the number of each step as the loop reports it."""
    count = 0
    for line in loop.follow():
        if loss_of(line) is not None:
            count += 1
            yield count


@pytest.fixture(scope="module")
def story(everloop: Everloop) -> Story:
    """One loop through every fault, then the same loop unbroken."""
    seed = int(os.environ.get("EVERLOOP_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"EVERLOOP_TEST_SEED={seed}")
    rng = random.Random(seed)
    arguments = ("--steps", str(STEPS))
    loop = everloop.loop("broken", *arguments, "--pause-every", str(STEPS_BETWEEN))
    strikes: dict[str, Strike] = {}
    loop.start()
    try:
        for step in steps_of(loop):
            if step % STEPS_BETWEEN == 0 and step // STEPS_BETWEEN <= len(VICTIMS):
                victim = VICTIMS[step // STEPS_BETWEEN - 1]
                kind = rng.choice(["forward_backward", "optim_step"])
                # Creation is number 0 and save_state 1; then two operations a step.
                after = 1 + 2 * step + rng.randrange(2 * STEPS_BETWEEN - 2)
                print(f"{victim}: {kind} above {after}")
                strikes[victim] = strike(everloop, loop, victim, kind, after)
    finally:
        loop.stop()
    for victim in ("partition", "node"):
        everloop.session.cluster.node_heal(strikes[victim].before["pod"]["node"])
    journal = everloop.session.journal()
    describe = everloop.session.tools.kube("-n", NAMESPACE, "describe", "tsess", NAME)
    plain = everloop.loop("unbroken", *arguments)
    plain.start()
    try:
        assert len(list(steps_of(plain))) == STEPS
    finally:
        plain.stop()

    return Story(
        strikes,
        journal,
        everloop.ledger("broken"),
        everloop.adapter("broken", STEPS),
        everloop.adapter("broken", 0),
        everloop.adapter("unbroken", STEPS),
        describe,
    )


def test_final_adapter_equals_that_of_an_unbroken_run(story: Story) -> None:
    """Bit-equal after engine, server, spare, pod and node were killed and a node partitioned."""
    assert adapters.fingerprint(story.broken) == adapters.fingerprint(story.unbroken)


def test_adapter_is_far_from_its_initial_value(story: Story) -> None:
    """Every tensor moved: equality above is not that of two untouched adapters."""
    assert story.broken.keys() == story.initial.keys()
    assert all(story.broken[name].data != story.initial[name].data for name in story.broken)


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_fell_in_the_middle_of_an_operation(story: Story, victim: str) -> None:
    """The journal shows the operation accepted and started before the kill, its result after it."""
    fault = story.strikes[victim]
    key = (fault.operation.stream, fault.operation.number)
    positions = {
        kind: [i for i, r in enumerate(story.journal) if r["t"] == kind and (r.get("s"), r.get("n")) == key]
        for kind in ("accept", "try", "result")
    }
    assert len(positions["accept"]) == len(positions["result"]) == 1
    assert positions["accept"][0] < fault.journal_length <= positions["result"][0]
    if victim != "spare":
        assert len(positions["try"]) >= 2, "the operation was started again after the kill"


@pytest.mark.parametrize("victim", VICTIMS)
def test_what_was_killed_was_replaced(story: Story, victim: str) -> None:
    """Attempt, incarnation or engine process changed as the fault demands, and nothing else did."""
    fault = story.strikes[victim]
    new_pod = victim in ("pod", "partition", "node")
    assert fault.after["attempt"] == fault.before["attempt"] + new_pod
    assert (fault.successor > fault.incarnation) == (new_pod or victim == "server")
    if victim == "engine":
        key = (fault.operation.stream, fault.operation.number)
        engines = [r["engine"] for r in story.journal if r["t"] == "try" and (r["s"], r["n"]) == key]
        assert engines[0] == fault.operation.engine
        assert engines[-1] != fault.operation.engine


def test_every_update_is_in_the_lineage_exactly_once(story: Story) -> None:
    """What the client was told, by its own ledger, is what the sealed history holds, once each."""
    model = next(e["model_id"] for e in story.ledger if e["event"] == "model")
    steps = [e["step"] for e in story.ledger if e["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    applied = applied_steps(story.journal, model)
    assert applied == sorted(set(applied))
    assert len(applied) == STEPS


@pytest.mark.parametrize("victim", ["partition", "node"])
def test_status_tells_which_node_was_lost(story: Story, victim: str) -> None:
    """Which node, why, from which operation, nothing lost, in how many seconds; and the pod is elsewhere."""
    fault = story.strikes[victim]
    node = fault.before["pod"]["node"]
    assert fault.after["pod"]["node"] != node
    assert fault.entry is not None
    assert fault.entry["node"] == node
    assert fault.entry["reason"] == "NodeLost"
    assert fault.entry["resumedFrom"]
    assert fault.entry["lostOperations"] == 0
    assert float(fault.entry["seconds"]) > 0
    assert node in story.describe


def test_zombie_cannot_write_into_the_lineage(story: Story, everloop: Everloop) -> None:
    """The partitioned pod, with a result to write, met the fence; what it wrote, if so, lies behind its seal."""
    fault = story.strikes["partition"]
    successor = next(r for r in story.journal if r["t"] == "open" and r["n"] == fault.incarnation + 1)
    sealed = next(s["length"] for s in successor["seals"] if s["incarnation"] == fault.incarnation)
    written = (everloop.session.lineage_root / "journal" / f"{fault.incarnation:08d}.log").stat().st_size
    assert written >= sealed
    assert f"incarnation {fault.incarnation} is superseded by incarnation {fault.incarnation + 1}" in fault.words
    results = [(r["s"], r["n"]) for r in story.journal if r["t"] == "result"]
    assert len(results) == len(set(results))


def test_describe_tells_the_story(story: Story) -> None:
    """Events name the lost node, the new attempt and the recovery."""
    for word in ("NodeLost", "NewAttempt", "Recovered", "replayed", "lost 0"):
        assert word in story.describe, story.describe


def test_results_survive_in_the_journal_of_the_volume(story: Story, everloop: Everloop, tmp_path: Path) -> None:
    """The journal dump is JSON lines that a person can read."""
    out = tmp_path / "dump.jsonl"
    out.write_text("\n".join(json.dumps(r) for r in everloop.session.journal()))
    assert json.loads(out.read_text().splitlines()[0])["t"] == "open"
