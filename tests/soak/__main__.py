"""``make soak N=100``: kill at random under one endless loop, then run as many steps unbroken and compare.

Each kill picks a victim and a moment at random, with a seed that is printed; what was killed is healed before the
next. The loop's user code sees none of it. With the same seed the same kills are tried in the same order; where they
fall among the operations depends on the machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

from demo import adapters, faults, install
from demo.loop import Loop
from demo.moments import applied_steps, running
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop, installed

LONGEST_PAUSE_SECONDS = 6.0


class Soak:
    """One loop under random faults."""

    def __init__(self, everloop: Everloop, rng: random.Random) -> None:
        self._session = everloop.session
        self._rng = rng
        self._down: list[str] = []
        self.struck: Counter[str] = Counter()
        self.in_operation = 0

    def victims(self) -> dict[str, Callable[[], None]]:
        """What can be killed, and how."""
        inside = ("engine", "server", "spare", "supervisor")
        components = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
        return {
            **{role: functools.partial(self._kill_inside, role) for role in inside},
            "pod": self._delete_pod,
            "node": functools.partial(self._lose_node, self._session.cluster.node_kill),
            "partition": functools.partial(self._lose_node, self._session.cluster.node_partition),
            "operator": functools.partial(self._kill_pod_of, "operator"),
            "gateway": functools.partial(self._kill_pod_of, "gateway"),
            **{name: functools.partial(self._kill_component, name) for name in components},
        }

    def strike(self) -> str:
        """Wait a random while, kill a random victim, and report whether an operation ran then."""
        while True:
            time.sleep(self._rng.uniform(0.0, LONGEST_PAUSE_SECONDS))  # the moment is what is drawn, not waited for
            victims = self.victims()
            victim = self._rng.choice(list(victims))
            now = running(self._session.journal())
            try:
                victims[victim]()
            except LookupError as absent:  # down already from the fault before
                print(f"           missed: {absent}", flush=True)
                continue
            self.in_operation += now is not None
            self.struck[victim] += 1
            return victim + (f" during {now.kind} {now.number}" if now else " while nothing ran")

    def heal(self) -> None:
        """Bring lost nodes back, and wait until the session serves."""
        eventually(self._serves, "the session to serve again", seconds=240)
        for node in self._down:
            self._session.cluster.node_heal(node)
            self._session.cluster.wait_node(node, ready=True, seconds=60)
        self._down.clear()

    def _serves(self) -> bool:
        try:
            status = self._session.status()
        except RuntimeError:  # the API server is among the victims
            return False
        pod = status.get("pod", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        return conditions.get("Serving") == "True" and pod.get("node") not in self._down

    def _pod(self) -> dict[str, str]:
        return eventually(self._status_pod, "a pod in the status", seconds=120)

    def _status_pod(self) -> dict[str, str] | None:
        try:
            return self._session.status().get("pod")
        except RuntimeError:
            return None

    def _kill_inside(self, role: str) -> None:
        now = running(self._session.journal())
        pids = self._session.pids(self._pod()["name"])
        faults.kill(pids, role, now.engine if now else None)

    def _delete_pod(self) -> None:
        self._session.tools.kube(
            "-n", NAMESPACE, "delete", "pod", self._pod()["name"], "--grace-period=0", "--force", "--ignore-not-found"
        )

    def _lose_node(self, lose: Callable[[str], None]) -> None:
        node = self._pod()["node"]
        self._down.append(node)
        lose(node)

    def _kill_pod_of(self, component: str) -> None:
        selector = f"app.kubernetes.io/component={component}"
        pods = self._session.tools.get("-n", install.RELEASE_NAMESPACE, "pods", "-l", selector)
        pod = self._rng.choice(sorted(pod["metadata"]["name"] for pod in pods["items"]))
        for pid in self._session.cluster.container_pids(pod, install.RELEASE_NAMESPACE)[:1]:
            os.kill(pid, signal.SIGKILL)

    def _kill_component(self, name: str) -> None:
        component = self._session.cluster.component(name)
        if component is None:
            raise LookupError(f"{name} does not run")
        component.kill()


def drive(everloop: Everloop, loop: Loop, kills: int, rng: random.Random) -> Soak:
    """Strike ``kills`` times while the loop runs."""
    soak = Soak(everloop, rng)
    started = time.monotonic()
    for number in range(1, kills + 1):
        assert loop.process is not None
        if loop.process.poll() is not None:
            list(loop.follow())  # raises with the loop's own words
            raise RuntimeError("the loop ended by itself")
        struck = soak.strike()
        soak.heal()
        elapsed = time.monotonic() - started
        left = elapsed / number * (kills - number)
        print(f"{elapsed:7.1f} s  {number}/{kills}  {struck}   about {left:.0f} s left", flush=True)
    return soak


def main() -> int:
    """Run it; the exit status is 0 only if nothing was lost, nothing ran twice and the adapters are bit-equal."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with installed(nodes=4) as everloop:
        stop = everloop.directory / "stop"
        loop = everloop.loop("broken", "--steps", "1000000", "--until", str(stop))
        loop.start()
        try:
            soak = drive(everloop, loop, arguments.kills, random.Random(arguments.seed))
            stop.touch()
            list(loop.follow())
        finally:
            loop.stop()
        ledger = everloop.ledger("broken")
        steps = [entry["step"] for entry in ledger if entry["event"] == "step"]
        model = next(entry["model_id"] for entry in ledger if entry["event"] == "model")
        applied = applied_steps(everloop.session.journal(), model)
        once = steps == list(range(1, len(steps) + 1)) and len(applied) == len(set(applied)) == len(steps)
        print(f"{arguments.kills} kills, {soak.in_operation} of them in an operation: {dict(soak.struck)}")
        print(f"{len(steps)} steps, each told once and in the lineage once: {'yes' if once else 'NO'}", flush=True)
        plain = everloop.loop("unbroken", "--steps", str(len(steps)))
        plain.start()
        try:
            list(plain.follow())
        finally:
            plain.stop()
        first, second = (adapters.fingerprint(everloop.adapter(n, len(steps))) for n in ("broken", "unbroken"))
        print(f"ADAPTER broken={first} unbroken={second} equal={'yes' if first == second else 'no'}", flush=True)
        return 0 if once and first == second else 1


def interrupted(_signal: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: the cluster goes."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    sys.exit(main())
