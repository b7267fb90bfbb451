"""``make soak N=1000``: kill at random under one loop, for as long as you like.

The kills are done in legs, each on a cluster of its own: at the end of a leg the loop's results and its adapter must
equal those of as many unbroken steps. Each kill picks victim and moment at random; with the same seed the same
victims are tried in the same order, where they fall among the operations depends on the machine. A soak that was
stopped or killed goes on with RESUME=DIR: the leg that was cut short counts for nothing and is done again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from devcluster.cluster import Cluster
from tests.e2e.world import Everloop, installed
from tests.soak import evidence
from tests.soak.interrupt import end_like_ctrl_c
from tests.soak.leg import LINGER_SECONDS, Kill, compare, drive, start
from tests.soak.state import Leg, State

REPOSITORY = Path(__file__).resolve().parents[2]
NODES = 4


class Soak:
    """The legs of one soak, and its directory."""

    def __init__(self, directory: Path, state: State, kills_of_a_leg: int) -> None:
        self.directory = directory
        self.state = state
        self.kills_of_a_leg = kills_of_a_leg
        self.started = time.monotonic()
        self.done = 0
        """Kills of this process, in legs of whatever end."""

    def run(self) -> bool:
        """Do all legs that are left; False as soon as one ends badly."""
        self.clear()
        while kills := self.state.next_leg(self.kills_of_a_leg):
            leg = self.leg(self.state.begun + 1, kills)
            self.state.legs.append(leg)
            self.state.save(self.directory)
            found = leg.fault or "all results and the adapter equal those of an unbroken run"
            print(
                f"leg {leg.number}: {leg.kills} kills, {leg.in_operation} in an operation,"
                f" {leg.together} of two at once, {leg.steps} steps: {found}"
            )
            if leg.fault:
                return False
        print(f"{self.state.proven} kills: {dict(self.state.struck)}", flush=True)
        return True

    def clear(self) -> None:
        """Take down what a predecessor that was killed has left."""
        if self.state.cluster and Path(self.state.cluster).exists():
            Cluster(self.state.cluster).down()
            shutil.rmtree(self.state.cluster)

    def leg(self, number: int, kills: int) -> Leg:
        """Do one leg."""
        begun = time.monotonic()
        seed = self.state.seed + number
        self.state.begun = number
        root = Path("/tmp") / f"everloop-soak-{self.state.seed}-{number}"
        self.state.cluster = str(root)
        self.state.save(self.directory)
        print(f"leg {number}: {kills} kills, seed {seed}", flush=True)
        with installed(NODES, root) as everloop:
            try:
                leg = self.kill_and_compare(everloop, number, kills, seed, begun)
            except (RuntimeError, OSError, LookupError) as error:
                leg = Leg(number, 0, 0, 0, time.monotonic() - begun, {}, str(error))
            if leg.fault:
                kept = self.directory / f"leg-{number}"
                evidence.keep(everloop, kept)
                print(f"journals and logs of leg {number}: {kept}", flush=True)
            return leg

    def kill_and_compare(self, everloop: Everloop, number: int, kills: int, seed: int, begun: float) -> Leg:
        """The loop with its kills, and what comes of it. Raises RuntimeError, TimeoutError."""
        stop = everloop.directory / "stop"
        broken = start(everloop, "broken", seed, "--until", str(stop), "--linger", str(LINGER_SECONDS))
        try:
            struck = drive(everloop, broken, kills, random.Random(seed), lambda kill: self.report(number, kill))
            stop.touch()
            path = broken.finish()
        finally:
            broken.loop.stop()
        steps, fault = compare(everloop, broken, path, seed)
        seconds = time.monotonic() - begun
        return Leg(number, kills, struck.in_operation, steps, seconds, dict(struck.victims), fault, struck.together)

    def report(self, leg: int, kill: Kill) -> None:
        """Tell of a kill, and keep it in a log."""
        self.done += 1
        elapsed = time.monotonic() - self.started
        left = elapsed / self.done * (self.state.kills - self.state.proven - kill.number)
        with (self.directory / "kills.jsonl").open("a") as log:
            log.write(json.dumps({"leg": leg, **asdict(kill), "time": time.time()}) + "\n")
        during = f"during {kill.during}" if kill.during else "while nothing ran"
        after = "the next at once" if kill.seconds is None else f"next result after {kill.seconds:.1f} s"
        victims = " and ".join(kill.victims)
        total = f"{self.state.proven + kill.number}/{self.state.kills}"
        print(
            f"{elapsed:7.1f} s  {total}  {victims} {during}: {after}   about {left / 60:.0f} min left",
            flush=True,
        )


def main() -> int:
    """Run it; the exit status is 0 only if nothing was lost, done twice or different."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--leg", type=int, default=50, help="kills of one leg")
    parser.add_argument("--resume", type=Path, help="directory of a soak that was stopped")
    arguments = parser.parse_args()
    if arguments.resume:
        directory = arguments.resume.resolve()
        state = State.load(directory)
    else:
        state = State(arguments.seed, arguments.kills)
        directory = REPOSITORY / "build" / f"soak-{state.seed}"
        directory.mkdir(parents=True)
        state.save(directory)
    print(f"seed {state.seed}; what it knows of itself is in {directory}", flush=True)
    soak = Soak(directory, state, arguments.leg)
    try:
        good = soak.run()
    except KeyboardInterrupt:
        print(f"stopped after {state.proven} kills in whole legs; go on with: make soak RESUME={directory}", flush=True)
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
