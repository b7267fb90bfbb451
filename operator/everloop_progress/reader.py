"""The reader of one pod: begins the attempt, reads on whenever it is asked, and says what it knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attempts import Attempt, Stale, begin
from .history import Goal, Point
from .pace import Pace
from .tails import Trouble

PATIENCE_SECONDS = 1.0
"""For how long an answer may wait for storage; then the last one is given again."""
LONGEST_PROBLEM = 200


@dataclass(frozen=True, slots=True)
class Task:
    """What the reader was started for."""

    job: Path
    attempt: int
    given: Point
    start: str
    """The checkpoint that the job starts from, or ""."""


class Reader:
    """May be asked by several threads at a time."""

    def __init__(self, task: Task, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._clock = clock
        self._lock = threading.Lock()
        self._state: Attempt | Stale | None = None
        self._pace = Pace()
        self._goal: Goal | None = None
        self._told: dict[str, Any] = {"state": "Starting", "attempt": task.attempt}

    @property
    def started(self) -> bool:
        """Whether the driver may start."""
        return isinstance(self._state, Attempt)

    def report(self, goal: Goal | None) -> dict[str, Any]:
        """What is known now, or, while storage hangs, what was known before."""
        if self._lock.acquire(timeout=PATIENCE_SECONDS):
            try:
                self._goal = goal
                self._told = self._read()
            finally:
                self._lock.release()
        return self._told

    def last_words(self) -> dict[str, Any]:
        """The report at the end, with the goal that was asked about before."""
        return self.report(self._goal)

    def _read(self) -> dict[str, Any]:
        problem, task = "", self._task
        try:
            if self._state is None:
                self._state = begin(task.job, task.attempt, task.given, task.start)
            if isinstance(self._state, Attempt):
                problem = self._state.refresh()
        except Trouble as trouble:
            problem = str(trouble)
        said: dict[str, Any] = {"attempt": task.attempt, "problem": problem[:LONGEST_PROBLEM]}
        if self._state is None:
            return {"state": "Starting", **said}
        if isinstance(self._state, Stale):
            return {"state": "Stale", **said, "resume": _point(self._state.resume)}
        return {"state": "Started", **said, **self._describe(self._state)}

    def _describe(self, attempt: Attempt) -> dict[str, Any]:
        history, goal = attempt.history, self._goal
        said: dict[str, Any] = {
            "resume": _point(history.resume_point(self._task.start)),
            "iterations": len(history.iterations),
        }
        last = history.iterations.last
        if last:
            self._pace.note(last.iteration, self._clock())
            said |= {"iteration": last.iteration, "done": last.done}
            if "reward" in last.metrics:
                said["reward"] = decimal(last.metrics["reward"])
        pace = self._pace.seconds()
        if pace is not None:
            said["secondsPerIteration"] = decimal(pace)
        said |= self._evaluation(attempt)
        if goal:
            said["goalReached"] = history.reached(goal)
            best = history.best(goal)
            said["best"] = {**_point(best[0]), "value": decimal(best[1])} if best else None
        return said

    def _evaluation(self, attempt: Attempt) -> dict[str, Any]:
        last = attempt.history.evaluations.last
        if last is None or not last.metrics:
            return {}
        wanted = self._goal.metric.removeprefix("eval/") if self._goal else ""
        metric = wanted if wanted in last.metrics else min(last.metrics)
        value = decimal(last.metrics[metric])
        return {"evaluation": {"iteration": last.iteration, "metric": metric, "value": value, "time": last.time}}


def _point(point: Point) -> dict[str, Any]:
    return {"iteration": point.iteration, "checkpoint": point.checkpoint}


def decimal(value: float) -> str:
    """A number as the API has them: no exponent, ten digits behind the point."""
    text = f"{value:.10f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
