"""``make demo``: train over a real control plane while the engine and then the node are killed.

Then the same loop unbroken with the same LoRA seed; both adapters must be bit-equal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bootstrap import stage
from demo import adapters, faults, install
from demo.loop import Loop, loss_of
from demo.picture import Kill, draw
from demo.session import NAME, Session, raise_session
from demo.view import BLUE, GREEN, RED, View
from devcluster.cluster import Cluster

REPOSITORY = Path(__file__).resolve().parents[1]
NAMESPACE = "team-poems"


class Demo:
    """One run of the demonstration on a cluster of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.view = View(steps=arguments.steps)
        self.ready = stage.prepare()
        self.root = Path(tempfile.mkdtemp(prefix="everloop-demo-"))
        self.root.chmod(0o755)
        self.cluster = Cluster(self.root)
        self.killed_nodes: list[str] = []
        self.kills: list[Kill] = []
        self.session: Session | None = None

    def raise_curtain(self) -> Session:
        """Bring everything up and show the two exports."""
        self.view.say(f"the cluster's files are in {self.root}")
        session = raise_session(self.cluster, self.ready, namespace=NAMESPACE, nodes=3, say=self.view.say)
        self.view.say("the session serves; this is what the training loop sees of it:")
        self.view.say(f"  export TINKER_BASE_URL={session.url}")
        self.view.say(f"  export TINKER_API_KEY={session.key[:17]}...")
        return session

    # --- the loop, with and without faults ---

    def run(self, session: Session, name: str, curve: list[float], kill_at: dict[int, str]) -> str:
        """Run examples/sft.py; before step ``k`` ends kill what ``kill_at[k]`` says. Returns the checkpoint's path."""
        loop = Loop(
            self.ready.client_python, REPOSITORY / "examples" / "sft.py", session.url, session.key,
            self.root / f"{name}.log", ("--steps", str(self.arguments.steps), "--name", name),
        )  # fmt: skip
        saved = ""
        loop.start()
        try:
            for line in loop.follow():
                loss = loss_of(line)
                if loss is not None:
                    self.view.step(curve, loss)
                    if len(curve) in kill_at:
                        self.strike(session, kill_at[len(curve)], len(curve))
                elif line.startswith("saved "):
                    saved = line.split()[1]
                elif line.startswith("sample "):
                    self.view.say("the tuned model writes: " + line.removeprefix("sample "), BLUE)
        finally:
            loop.stop()
        return saved

    def strike(self, session: Session, victim: str, step: int) -> None:
        """Kill the engine or the node in the middle of a forward_backward and watch the recovery."""
        before = session.status()
        pids = session.pids(before["pod"]["name"])
        now = faults.hold(session.journal, pids, "forward_backward")
        node = before["pod"]["node"]
        where = f"in the middle of {now.kind} {now.number}"
        self.view.kills.append(step)
        killed = time.monotonic()
        if victim == "engine":
            process = faults.kill(pids, "engine", now.engine)
            self.view.say(f"KILLED the engine (SIGKILL to process {process.pid}) {where}", RED)
        else:
            self.cluster.node_kill(node)
            self.killed_nodes.append(node)
            self.view.say(f"KILLED node {node}, kubelet and every process on it, {where}", RED)
        entry = self.recovered(session, before, killed)
        seconds = time.monotonic() - killed
        self.kills.append(Kill(step, victim, seconds, int(entry["replayedOperations"]), int(entry["lostOperations"])))
        after = session.status()["pod"]["node"]
        moved = f", now on {after}" if after != node else ""
        self.view.say(
            f"RECOVERED in {seconds:.1f} s{moved}: {entry['replayedOperations']} operations replayed,"
            f" {entry['lostOperations']} lost ({entry['reason']}, from {entry['resumedFrom'] or 'the start'})",
            GREEN,
        )

    def recovered(self, session: Session, before: dict[str, Any], killed: float) -> dict[str, Any]:
        """Wait for the entry that the operator adds to ``status.recoveries``, telling what is seen on the way."""
        known = {entry["id"] for entry in before.get("recoveries", [])}
        phase = before["phase"]
        while time.monotonic() - killed < 180:
            status = session.status()
            if status["phase"] != phase:
                phase = status["phase"]
                self.view.say(f"{phase}: {self.reason(status)}")
            for entry in status.get("recoveries", []):
                if entry["id"] not in known and entry.get("seconds"):
                    found: dict[str, Any] = entry
                    return found
            time.sleep(0.2)
        raise TimeoutError(f"no recovery within 180 s; status: {json.dumps(session.status(), indent=1)}")

    @staticmethod
    def reason(status: dict[str, Any]) -> str:
        """Why the session does (not) serve, in the condition's words."""
        return str(next(c["message"] for c in status["conditions"] if c["type"] == "Serving"))

    # --- the end ---

    def play(self) -> bool:
        """Both runs, the comparison and the picture; True if the adapters are bit-equal."""
        session = self.session = self.raise_curtain()
        third = self.arguments.steps // 3
        self.view.title = "loss per token"
        broken = self.run(session, "broken", self.view.broken, {third: "engine", 2 * third: "node"})
        self.view.say("the same loop again, unbroken, with the same LoRA seed")
        unbroken = self.run(session, "unbroken", self.view.unbroken, {})
        self.view.close()
        print(session.tools.kube("-n", NAMESPACE, "get", "tsess"))
        picture = Path(self.arguments.picture)
        draw(self.view.broken, self.view.unbroken, self.kills, picture)
        print(f"both curves: {picture}")
        first, second = (adapters.fingerprint(session.adapter(path)) for path in (broken, unbroken))
        equal = first == second
        print(f"ADAPTER broken={first} unbroken={second} equal={'yes' if equal else 'no'}", flush=True)
        return equal

    def leave(self) -> None:
        """Keep the cluster and say what to try next."""
        lines = [
            f"export KUBECONFIG={self.cluster.kubeconfig} PATH={self.ready.kubectl.parent}:$PATH",
            f"kubectl get nodes; kubectl -n {NAMESPACE} get tsess,pods -o wide",
            f"kubectl -n {NAMESPACE} describe tsess {NAME}",
        ]
        if self.session is not None:
            key = self.root / "api-key"
            key.touch(mode=0o600)
            key.write_text(self.session.key)
            node = self.session.status()["pod"]["node"]
            heal = "python3 -m devcluster node heal"
            lines += [f"{heal} {each} --root {self.root}     # killed by the demo" for each in self.killed_nodes]
            lines += [
                f"export TINKER_BASE_URL={self.session.url} TINKER_API_KEY=$(cat {key})",
                f"{self.ready.client_python} examples/sft.py --steps 20 --name again",
                f"python3 -m devcluster node kill {node} --root {self.root}     # while it runs",
                f"{heal} {node} --root {self.root}",
            ]
        print("\nThe cluster stays. Try:", *lines, sep="\n  ")
        print(f"When done:\n  make demo-down ROOT={self.root}")

    def explain(self, error: Exception) -> None:
        """Say what failed, and what the cluster knows of it."""
        self.view.close()
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        if self.cluster.kubeconfig.exists():
            tools = install.Tools(self.ready.kubectl, self.ready.helm, self.cluster.kubeconfig)
            for what in (("pods", "-o", "wide"), ("events", "--field-selector", "type=Warning")):
                print(tools.kube("get", "-A", *what), file=sys.stderr)

    def tidy(self) -> None:
        """Take the cluster down and remove its files."""
        self.cluster.down()
        shutil.rmtree(self.root, ignore_errors=False)


def interrupted(_signal: int, _frame: FrameType | None) -> None:
    """End the demonstration as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Run it; the exit status is 0 only if both adapters are bit-equal."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running and print what to try next")
    parser.add_argument("--picture", default=str(REPOSITORY / "build" / "demo.png"))
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    demo = Demo(arguments)
    keep = arguments.keep
    try:
        return 0 if demo.play() else 1
    except (RuntimeError, TimeoutError, LookupError) as error:
        demo.explain(error)
        return 1
    except KeyboardInterrupt:
        keep = False
        print("\ninterrupted: taking the cluster down", file=sys.stderr)
        return 130
    finally:
        if keep:
            demo.leave()
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half a cluster
            demo.tidy()


if __name__ == "__main__":
    sys.exit(main())
