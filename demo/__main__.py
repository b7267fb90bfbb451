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
from demo.view import BLUE, GREEN, RED, View
from devcluster.cluster import Cluster
from everloop_trainer.store.dump import dump

REPOSITORY = Path(__file__).resolve().parents[1]
NAMESPACE, SESSION = "team-poems", "smollm2"


class Demo:
    """One run of the demonstration on a cluster of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.view = View(steps=arguments.steps)
        self.ready = stage.prepare()
        self.root = Path(tempfile.mkdtemp(prefix="everloop-demo-"))
        self.root.chmod(0o755)
        self.cluster = Cluster(self.root)
        self.tools = install.Tools(self.ready.kubectl, self.ready.helm, self.cluster.kubeconfig)
        self.kills: list[Kill] = []
        self.url = self.key = ""

    # --- the cluster and Everloop on it ---

    def raise_curtain(self) -> None:
        """Bring up the cluster, install the chart and apply the TrainingSession."""
        self.view.say("starting a control plane and three nodes with pretend GPUs")
        self.cluster.up(nodes=3, gpus=4, images=self.ready.images)
        self.view.say("installing Everloop: helm install everloop helm/everloop")
        install.install_chart(
            self.tools,
            operator_image=stage.OPERATOR_IMAGE,
            trainer_image=stage.TRAINER_IMAGE,
            tokenizer=self.ready.model,
        )
        training = self.cluster.shared / "training"
        training.mkdir(mode=0o777)
        training.chmod(0o777)
        self.key = install.make_tenant(self.tools, NAMESPACE, training=training, models=self.ready.model.parent)
        self.url = install.gateway_url(self.tools)
        self.view.say("kubectl apply -f examples/trainingsession.yaml")
        self.tools.kube("-n", NAMESPACE, "apply", "-f", str(REPOSITORY / "examples" / "trainingsession.yaml"))
        self.tools.kube(
            "-n", NAMESPACE, "wait", "--for=condition=Serving", f"tsess/{SESSION}", "--timeout=180s", seconds=200
        )
        self.view.say("the session serves; this is what the training loop sees of it:")
        self.view.say(f"  export TINKER_BASE_URL={self.url}")
        self.view.say(f"  export TINKER_API_KEY={self.key[:17]}...")

    @property
    def lineage_root(self) -> Path:
        """Where the session keeps its journal and checkpoints on the shared volume."""
        return self.cluster.shared / "training" / NAMESPACE / SESSION

    def journal(self) -> list[dict[str, Any]]:
        """Every record of the session's history so far."""
        return list(dump(self.lineage_root))

    def status(self) -> dict[str, Any]:
        """The TrainingSession's status as the API server has it."""
        status: dict[str, Any] = self.tools.get("-n", NAMESPACE, "tsess", SESSION).get("status", {})
        return status

    # --- the loop, with and without faults ---

    def run(self, name: str, curve: list[float], kill_at: dict[int, str]) -> str:
        """Run examples/sft.py; before step ``k`` ends kill what ``kill_at[k]`` says. Returns the checkpoint's path."""
        loop = Loop(
            self.ready.client_python, REPOSITORY / "examples" / "sft.py", self.url, self.key,
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
                        self.strike(kill_at[len(curve)], len(curve))
                elif line.startswith("saved "):
                    saved = line.split()[1]
                elif line.startswith("sample "):
                    self.view.say("the tuned model writes: " + line.removeprefix("sample "), BLUE)
        finally:
            loop.stop()
        return saved

    def strike(self, victim: str, step: int) -> None:
        """Kill the engine or the node in the middle of a forward_backward and watch the recovery."""
        before = self.status()
        pids = self.cluster.container_pids(before["pod"]["name"], NAMESPACE)
        now = faults.hold(self.journal, pids, "forward_backward")
        node = before["pod"]["node"]
        where = f"in the middle of {now.kind} {now.number}"
        self.view.kills.append(step)
        killed = time.monotonic()
        if victim == "engine":
            process = faults.kill(pids, "engine", now.engine)
            self.view.say(f"KILLED the engine (SIGKILL to process {process.pid}) {where}", RED)
        else:
            self.cluster.node_kill(node)
            self.view.say(f"KILLED node {node}, kubelet and every process on it, {where}", RED)
        entry = self.recovered(before, killed)
        seconds = time.monotonic() - killed
        self.kills.append(Kill(step, victim, seconds, int(entry["replayedOperations"]), int(entry["lostOperations"])))
        after = self.status()["pod"]["node"]
        moved = f", now on {after}" if after != node else ""
        self.view.say(
            f"RECOVERED in {seconds:.1f} s{moved}: {entry['replayedOperations']} operations replayed,"
            f" {entry['lostOperations']} lost ({entry['reason']}, from {entry['resumedFrom'] or 'the start'})",
            GREEN,
        )

    def recovered(self, before: dict[str, Any], killed: float) -> dict[str, Any]:
        """Wait for the entry that the operator adds to ``status.recoveries``, telling what is seen on the way."""
        known = {entry["id"] for entry in before.get("recoveries", [])}
        phase = before["phase"]
        while time.monotonic() - killed < 180:
            status = self.status()
            if status["phase"] != phase:
                phase = status["phase"]
                self.view.say(f"{phase}: {self.reason(status)}")
            for entry in status.get("recoveries", []):
                if entry["id"] not in known and entry.get("seconds"):
                    found: dict[str, Any] = entry
                    return found
            time.sleep(0.2)
        raise TimeoutError(f"no recovery within 180 s; status: {json.dumps(self.status(), indent=1)}")

    @staticmethod
    def reason(status: dict[str, Any]) -> str:
        """Why the session does (not) serve, in the condition's words."""
        return str(next(c["message"] for c in status["conditions"] if c["type"] == "Serving"))

    # --- the end ---

    def play(self) -> bool:
        """Both runs, the comparison and the picture; True if the adapters are bit-equal."""
        self.raise_curtain()
        third = self.arguments.steps // 3
        self.view.title = "loss per token"
        broken = self.run("broken", self.view.broken, {third: "engine", 2 * third: "node"})
        self.view.say("the same loop again, unbroken, with the same LoRA seed")
        unbroken = self.run("unbroken", self.view.unbroken, {})
        self.view.close()
        print(self.tools.kube("-n", NAMESPACE, "get", "tsess"))
        picture = Path(self.arguments.picture)
        draw(self.view.broken, self.view.unbroken, self.kills, picture)
        print(f"both curves: {picture}")
        first, second = (
            adapters.fingerprint(adapters.read_tensors(adapters.checkpoint_file(self.lineage_root, path)))
            for path in (broken, unbroken)
        )
        equal = first == second
        print(f"ADAPTER broken={first} unbroken={second} equal={'yes' if equal else 'no'}", flush=True)
        return equal

    def leave(self) -> None:
        """Keep the cluster and say what to try next."""
        key = self.root / "api-key"
        key.touch(mode=0o600)
        key.write_text(self.key)
        print(
            f"""
The cluster stays. Try:
  export KUBECONFIG={self.cluster.kubeconfig} PATH={self.ready.kubectl.parent}:$PATH
  kubectl get nodes; kubectl -n {NAMESPACE} get tsess,pods -o wide
  kubectl -n {NAMESPACE} describe tsess {SESSION}
  export TINKER_BASE_URL={self.url} TINKER_API_KEY=$(cat {key})
  {self.ready.client_python} examples/sft.py --steps 20 --name again
  python3 -m devcluster node kill NODE --root {self.root}     # while it runs
When done:
  make demo-down ROOT={self.root}"""
        )

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
    signal.signal(signal.SIGTERM, interrupted)
    demo = Demo(arguments)
    keep = arguments.keep
    try:
        return 0 if demo.play() else 1
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
