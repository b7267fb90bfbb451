"""The acts of the matrix: one loop for each victim, compared with the same loop unbroken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.matrix.moments import flaws
from tests.matrix.play import Cell, Play, Struck
from tests.matrix.stage import Stage


@dataclass(frozen=True, slots=True)
class Act:
    """A loop that was struck, and what was wrong with it; nothing should be."""

    struck: tuple[Struck, ...]
    wrong: tuple[str, ...]


class Acts:
    """Plays acts on one stage. Unbroken loops of the same length are played once."""

    def __init__(self, stage: Stage, tell: Callable[[Cell, Struck | None], None]) -> None:
        self._stage = stage
        self._tell = tell
        self._unbroken: dict[int, tuple[list[dict[str, Any]], list[str]]] = {}

    def play(self, name: str, cells: Sequence[Cell]) -> Act:
        """Strike all cells under one loop of this name, then look for flaws.

        Raises:
            RuntimeError: the loop saw an exception, or a moment was never met.
            TimeoutError: something did not come back.
        """
        others = flaws(self._stage.facts(), self._stage.manifests())  # of whoever used the session before
        play = Play(self._stage, name, self._tell)
        struck = play.strike(cells)
        told, saved = self._reference(play.rounds)
        wrong = [f"{met.cell.victim} in {met.cell.moment}: {oddity}" for met in struck for oddity in met.oddities]
        wrong += [flaw for flaw in flaws(self._stage.facts(), self._stage.manifests()) if flaw not in others]
        wrong += [
            f"the loop was told {got}, unbroken {wanted}"
            for got, wanted in zip(play.told(), told, strict=True)
            if got != wanted
        ]
        if play.saved() != saved:
            wrong.append(f"saved adapters differ: {play.saved()}, unbroken {saved}")
        if len(set(saved)) < 2:
            wrong.append("the loop changed nothing, so equality says nothing")
        return Act(tuple(struck), tuple(wrong))

    def _reference(self, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
        if rounds not in self._unbroken:
            play = Play(self._stage, f"unbroken-{rounds}", self._tell)
            play.unbroken(rounds)
            self._unbroken[rounds] = play.told(), play.saved()
        return self._unbroken[rounds]
