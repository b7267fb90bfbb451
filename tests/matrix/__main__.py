"""``make acceptance``: every victim in every moment, one loop after the other on one cluster.

The journal proves for each kill that it fell in its moment; a moment that was missed is tried again in the loop's next
round. At the end of each loop what it was told and all that it saved must equal an unbroken run's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from tests.e2e.world import Everloop, installed
from tests.matrix.acts import Act, Acts
from tests.matrix.creation import Creations
from tests.matrix.moments import OF_THE_LOOP, Moment
from tests.matrix.picture import draw
from tests.matrix.play import Cell, Struck
from tests.matrix.stage import Stage
from tests.matrix.victims import Victim
from tests.soak import evidence
from tests.soak.interrupt import end_like_ctrl_c

BUILD = Path(__file__).resolve().parents[2] / "build"


class Progress:
    """A line for each cell: how far, and about how long still."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._done = 0
        self._start = time.monotonic()

    def tell(self, cell: Cell, struck: Struck | None) -> None:
        """Show one cell that was struck, or was not met."""
        elapsed = time.monotonic() - self._start
        text = f"{elapsed:7.1f} s  {self._done}/{self._cells}  {cell.victim} in {cell.moment}: "
        if struck is None:
            print(text + "not met, again in the next round", flush=True)
            return
        self._done += 1
        left = elapsed / self._done * (self._cells - self._done) / 60
        odd = "".join(f"; ODD: {oddity}" for oddity in struck.oddities)
        print(f"{text}told after {struck.seconds:.1f} s{odd}   about {left:.0f} min left", flush=True)


def perform(everloop: Everloop, arguments: argparse.Namespace) -> dict[Victim, Act]:
    """One act for each victim; ends after the first in which something was wrong, and keeps what explains it."""
    victims, moments = arguments.victims, [m for m in OF_THE_LOOP if m in arguments.moments]
    progress = Progress(len(victims) * len(arguments.moments))
    stage = Stage(everloop, random.Random(arguments.seed))
    loops, creations = Acts(stage, progress.tell), Creations(stage)
    acts: dict[Victim, Act] = {}
    for victim in victims:
        struck: list[Struck] = []
        wrong: list[str] = []
        try:
            if moments:
                act = loops.play(victim, [Cell(victim, moment) for moment in moments])
                struck, wrong = list(act.struck), list(act.wrong)
            if Moment.CREATION in arguments.moments:
                met, flaws = creations.strike(victim)
                progress.tell(met.cell, met)
                struck, wrong = [*struck, met], [*wrong, *flaws, *met.oddities]
        except (RuntimeError, OSError, LookupError) as error:
            wrong.append(str(error))
        acts[victim] = Act(tuple(struck), tuple(wrong))
        verdict = "WRONG" if wrong else "equal to the unbroken run, each operation once"
        print(f"{victim}: {len(struck)} kills, {verdict}", *wrong, sep="\n  ", flush=True)
        if wrong:
            kept = arguments.build / f"acceptance-{arguments.seed}-{victim}"
            evidence.keep(everloop, kept)
            if creations.made is not None and creations.made.session.lineage_root.exists():
                evidence.keep(creations.made, kept / "creation")
            print(f"  journals and logs: {kept}", flush=True)
            break
    return acts


def report(acts: dict[Victim, Act], arguments: argparse.Namespace) -> None:
    """Write acceptance.json and draw acceptance.png."""
    struck = [met for act in acts.values() for met in act.struck]
    arguments.build.mkdir(parents=True, exist_ok=True)
    values = {
        "seed": arguments.seed,
        "cells": [met.as_json() for met in struck],
        "wrong": {victim: list(act.wrong) for victim, act in acts.items()},
    }
    (arguments.build / "acceptance.json").write_text(json.dumps(values, indent=1))
    seconds = {(met.cell.victim.value, met.cell.moment.value): met.seconds for met in struck}
    picture = arguments.build / "acceptance.png"
    draw([v.value for v in arguments.victims], [m.value for m in arguments.moments], seconds, picture)
    print(f"{len(struck)} kills; {picture}", flush=True)


def main() -> int:
    """Run it; the exit status is 0 only if every cell was met and nothing was wrong."""
    parser = argparse.ArgumentParser(prog="make acceptance", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--victims", type=Victim, nargs="+", default=list(Victim), choices=list(Victim))
    parser.add_argument("--moments", type=Moment, nargs="+", default=list(Moment), choices=list(Moment))
    parser.add_argument("--build", type=Path, default=BUILD, help="where acceptance.json and acceptance.png go")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with installed(nodes=4) as everloop:
        acts = perform(everloop, arguments)
    report(acts, arguments)
    return 1 if any(act.wrong for act in acts.values()) else 0


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
