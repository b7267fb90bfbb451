"""One continuing loop through the moments that are wanted, each struck once."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import adapters
from demo.install import BASE_MODEL
from demo.loop import Loop
from tests.e2e.waiting import eventually
from tests.matrix.catching import catch
from tests.matrix.moments import KINDS, OF_THE_LOOP, Facts, Key, Moment, news
from tests.matrix.stage import TAKEOVER_SECONDS, Stage
from tests.matrix.victims import Victim, oddities

CLIENT = Path(__file__).parent / "clients" / "loop.py"
MOST_ROUNDS = 12
"""After so many rounds a moment that was never met is a failure."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A victim and the moment in which it is struck."""

    victim: Victim
    moment: Moment


@dataclass(frozen=True, slots=True)
class Struck:
    """A cell that was struck: what the journal said then, and how it went on."""

    cell: Cell
    rounds: int
    """In which round of the loop the moment was met."""
    operations: tuple[Key, ...]
    """What was under way."""
    seconds: float
    """From the kill until the loop was told what it waited for; in a quiet moment, what it asked for then."""
    oddities: tuple[str, ...]
    node: str
    attempt: int
    incarnation: int
    """Of the session when it was struck."""
    words: str = field(repr=False)
    """What a zombie logged."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "victim": self.cell.victim,
            "moment": self.cell.moment,
            "round": self.rounds,
            "operations": [f"{stream}:{number}" for stream, number in self.operations],
            "seconds": round(self.seconds, 2),
            "oddities": list(self.oddities),
        }


class Actor:
    """The loop's process, line by line."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def hear(self, seconds: float = 600.0) -> dict[str, Any]:
        """What it says next. Raises RuntimeError with its log if it ended, TimeoutError if it stays silent."""
        try:
            line = self._loop.lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the loop said nothing for {seconds:.0f} s") from None
        if line is None:
            raise RuntimeError(f"the training loop ended:\n{self._loop.log.read_text()[-4000:]}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def say(self, word: str = "go") -> None:
        """Let it go on."""
        self._loop.say(word)


class Play:
    """A loop and what happens to it.

    Args:
        stage: where it plays.
        name: of the loop; each has a name of its own.
        tell: called with each cell that was struck, and with each that was not met and is tried again (None).
    """

    def __init__(self, stage: Stage, name: str, tell: Callable[[Cell, Struck | None], None]) -> None:
        self.stage = stage
        self.name = name
        self.rounds = 0
        self._tell = tell

    def strike(self, cells: Sequence[Cell]) -> list[Struck]:
        """Run the loop round by round until each cell was met once.

        Raises:
            RuntimeError: the loop saw an exception, or a moment was never met.
        """
        return self._run(list(cells), rounds=0)

    def unbroken(self, rounds: int) -> None:
        """Run the loop for so many rounds and touch nothing."""
        self._run([], rounds)

    def _run(self, left: list[Cell], rounds: int) -> list[Struck]:
        loop = self._loop()
        actor, struck = Actor(loop), list[Struck]()
        loop.start()
        try:
            assert actor.hear()["told"] == "start"
            while actor.hear() and (left or self.rounds < rounds):
                if self.rounds == MOST_ROUNDS:
                    raise RuntimeError(f"never met in {MOST_ROUNDS} rounds: {left}")
                self.rounds += 1
                actor.say()
                self._round(actor, left, struck)
            actor.say("end")
            list(loop.follow())
        finally:
            loop.stop()
        return struck

    def _loop(self) -> Loop:
        everloop = self.stage.everloop
        ledger = str(everloop.directory / f"{self.name}.ledger")
        named = ("--base-model", BASE_MODEL, "--name", self.name, "--ledger", ledger)
        chunk = ("--chunk", str(everloop.chunk_datums()))
        return everloop.script(str(CLIENT), f"{self.name}.log", (*named, *chunk), everloop.session.key)

    def _round(self, actor: Actor, left: list[Cell], struck: list[Struck]) -> None:
        for moment in OF_THE_LOOP:
            heard = actor.hear()
            assert heard == {"at": moment}, heard
            cell = next((cell for cell in left if cell.moment == moment), None)
            if cell is None:
                actor.say()
                assert actor.hear()["told"] == moment
                continue
            met = self._scene(actor, cell)
            self._tell(cell, met)
            if met is not None:
                struck.append(met)
                left.remove(cell)

    def _scene(self, actor: Actor, cell: Cell) -> Struck | None:
        """Strike, if the moment is met, and hear on until the loop was told."""
        stage, moment = self.stage, cell.moment
        stage.nodes_ready()
        pod = stage.pod()
        if cell.victim == Victim.FREEZE:
            stage.bring_operator(pod.node)
        known = frozenset(eventually(lambda: _settled(stage), "everything so far to have a result").kinds)
        met = catch(stage, pod, moment, known, self.rounds - 1, actor.say)
        before = stage.facts()
        keys = news(moment, before, known)
        if not met:
            if moment not in KINDS:
                actor.say()
            assert actor.hear()["told"] == moment
            return None
        at = time.time()
        settle = stage.strike(cell.victim, moment, pod)
        if moment not in KINDS:
            actor.say()
        words = settle()
        heard = actor.hear(TAKEOVER_SECONDS)
        assert heard["told"] == moment
        after = eventually(lambda: _settled(stage), f"the journal to show the end of {cell}")
        return Struck(
            cell,
            self.rounds,
            tuple(keys),
            heard["time"] - at,
            tuple(oddities(cell.victim, moment, before, after, keys)),
            pod.node,
            before.attempt,
            before.incarnation,
            words,
        )

    # --- the end ---

    def told(self) -> list[dict[str, Any]]:
        """What the loop was told, without what differs by name between two runs of it."""
        return [
            {key: value for key, value in entry.items() if key not in {"path", "loaded", "model_id"}}
            for entry in self.stage.everloop.ledger(self.name)
        ]

    def saved(self) -> list[str]:
        """Fingerprints of the adapters that it saved, in order."""
        session = self.stage.everloop.session
        paths = [entry["path"] for entry in self.stage.everloop.ledger(self.name) if "path" in entry]
        return [adapters.fingerprint(session.adapter(path)) for path in paths]


def _settled(stage: Stage) -> Facts | None:
    """The journal's facts, if every operation in it has a result."""
    facts = stage.facts()
    return None if facts.unfinished() else facts
