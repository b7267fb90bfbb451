"""``python -m tests.soak.outage``: twelve minutes without a free node, and one client with a call of each kind in it.

The session's node is lost while other workloads hold the GPUs of all others. Gateway replicas are killed on the way,
so that every way of waiting has its connection broken: held answers, pauses and polls. The SDK's clock is as it is.
Afterwards there is no exception in any client, each operation was done once, and results and adapters equal those of
the same clients without an outage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap import stage
from demo import adapters, install
from demo.loop import Loop
from tests.e2e.waiting import eventually
from tests.e2e.world import Everloop, installed
from tests.prepared import client_python
from tests.soak import evidence
from tests.soak.interrupt import end_like_ctrl_c
from tests.soak.ledger import done_twice

KINDS = (
    "forward_backward", "optim_step", "sample", "save_state", "save_weights_for_sampler", "load_state",
    "create_from_state", "create_model", "create_session",
)  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).parent / "clients" / "pending.py"
FILLERS = "others"
GPUS_OF_A_NODE = 4
SECONDS_BETWEEN_KILLS = 110.0


@dataclass
class Client:
    """One program, and what it was told."""

    kind: str
    name: str
    loop: Loop
    ledger: Path
    adapter: str = ""

    def wait_ready(self) -> None:
        """Until it is about to make its call. Raises RuntimeError with its own words if it ends before."""
        for line in self.loop.follow():
            if line == "ready":
                return
        raise RuntimeError(f"{self.name} ended before it was ready")

    def finish(self, everloop: Everloop) -> None:
        """Until it ends well. Raises RuntimeError with its own words if it does not."""
        for line in self.loop.follow():
            if line.startswith("saved "):
                self.adapter = adapters.fingerprint(everloop.session.adapter(line.split()[1]))

    def told(self) -> list[dict[str, Any]]:
        """The ledger."""
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]


def start(everloop: Everloop, kind: str, run: str) -> Client:
    """Start the client of one kind."""
    name = f"{run}-{kind.replace('_', '-')}"
    ledger = everloop.directory / f"{name}.ledger"
    ledger.touch()
    arguments = ("--kind", kind, "--base-model", install.BASE_MODEL, "--name", name, "--ledger", str(ledger))
    session = everloop.session
    log = everloop.directory / f"{name}.log"
    loop = Loop(Path(client_python()), CLIENT, session.url, session.key, log, arguments)
    loop.start()
    return Client(kind, name, loop, ledger)


def filler(node: str) -> dict[str, Any]:
    """A pod of somebody else that holds all GPUs of a node."""
    limits = {"limits": {"nvidia.com/gpu": GPUS_OF_A_NODE}}
    command = ["python", "-c", "import signal; signal.pause()"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"filler-{node}", "namespace": FILLERS},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": stage.OPERATOR_IMAGE, "command": command, "resources": limits}],
        },
    }


def take_all_nodes(everloop: Everloop) -> str:
    """Lose the session's node while no other one is free. Returns its name."""
    session = everloop.session
    lost: str = session.status()["pod"]["node"]
    others = [node for node in session.cluster.settings.nodes if node != lost]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": FILLERS}}
    items = [namespace, *(filler(node) for node in others)]
    session.tools.kube("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    wait = ("wait", "--for=condition=Ready", "pod", "--all", "--timeout=60s")
    session.tools.kube("-n", FILLERS, *wait)
    session.cluster.node_kill(lost)
    return lost


def kill_a_gateway(everloop: Everloop, rng: random.Random) -> str:
    """SIGKILL to one replica that runs. Returns its pod."""
    session = everloop.session
    selector = "app.kubernetes.io/component=gateway"
    pods = session.tools.get("-n", install.RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
    names = [str(pod["metadata"]["name"]) for pod in pods]
    running = {name: session.cluster.container_pids(name, install.RELEASE_NAMESPACE) for name in names}
    pod = rng.choice(sorted(name for name, pids in running.items() if pids))
    os.kill(running[pod][0], signal.SIGKILL)
    return pod


def outlast(everloop: Everloop, clients: list[Client], minutes: float, rng: random.Random) -> None:
    """The outage, told as it goes; raises as soon as a client ends in it."""
    started = time.monotonic()
    end, kill_at = started + 60 * minutes, started + SECONDS_BETWEEN_KILLS / 2
    while time.monotonic() < end:
        for client in clients:
            assert client.loop.process is not None
            if client.loop.process.poll() is not None:
                client.finish(everloop)
                raise RuntimeError(f"{client.name} ended in the outage")
        if time.monotonic() >= kill_at:
            kill_at += SECONDS_BETWEEN_KILLS
            pod = kill_a_gateway(everloop, rng)
            elapsed = time.monotonic() - started
            print(f"{elapsed:7.1f} s  killed {pod}   {end - time.monotonic():.0f} s of the outage left", flush=True)
        time.sleep(0.5)
    phase = everloop.session.status()["phase"]
    print(f"{time.monotonic() - started:7.1f} s  the session is {phase}; a node is free again", flush=True)


def run(everloop: Everloop, minutes: float, rng: random.Random) -> bool:
    """Both runs and the comparison; True if nothing differs."""
    clients = [start(everloop, kind, "broken") for kind in KINDS]
    try:
        for client in clients:
            client.wait_ready()
        lost = take_all_nodes(everloop)
        print(f"{len(KINDS)} clients; node {lost} is lost, and no other one is free", flush=True)
        for client in clients:
            client.loop.say("go on")
        outlast(everloop, clients, minutes, rng)
        everloop.session.tools.kube("delete", "namespace", FILLERS, "--wait=false")
        eventually(lambda: everloop.session.status()["phase"] == "Running" or None, "the session", seconds=900)
        for client in clients:
            client.finish(everloop)
    finally:
        for client in clients:
            client.loop.stop()
    twice = done_twice(everloop.session.journal())
    print(f"operations done twice: {', '.join(twice) or 'none'}", flush=True)
    equal = not twice
    for client in clients:
        plain = start(everloop, client.kind, "plain")
        try:
            plain.wait_ready()
            plain.loop.say("go on")
            plain.finish(everloop)
        finally:
            plain.loop.stop()
        same = (client.told(), client.adapter) == (plain.told(), plain.adapter)
        equal = equal and same
        print(f"{client.kind:26s} {'equal' if same else 'DIFFERS'}  {client.adapter[:12]}", flush=True)
    return equal


def main() -> int:
    """Run it; the exit status is 0 only if nothing was lost, done twice or different."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.outage", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="that the outage lasts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with installed(nodes=3) as everloop:
        try:
            equal = run(everloop, arguments.minutes, random.Random(arguments.seed))
        except (RuntimeError, OSError, LookupError) as error:
            print(error, flush=True)
            equal = False
        if not equal:
            kept = REPOSITORY / "build" / f"outage-{arguments.seed}"
            evidence.keep(everloop, kept)
            print(f"journals and logs: {kept}", flush=True)
        return 0 if equal else 1


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
