"""Asks the servers in pods for their reports, at their own pace: a pod that does not answer delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Generic, Protocol, TypeVar

import structlog

from everloop_operator.core import silence
from everloop_operator.core.observed import Answer

from .lateness import Lateness
from .metrics import UNHEARD
from .ports import Key, Now, Silent, Unanswered

log = structlog.get_logger()

CONCURRENT_REQUESTS = 64
REQUESTS_PER_SECOND = 100.0
"""What the pods that do well are asked in all: more would take the time that everything else needs."""
WAITED_FOR_SECONDS = 1.0
"""A pod that is asked this often is one that somebody waits for."""


class Question(Protocol):
    """Which pod to ask, and how often."""

    @property
    def ip(self) -> str:
        """Its address."""
        ...

    @property
    def pod_uid(self) -> str:
        """Its UID."""
        ...

    @property
    def attempt(self) -> int:
        """Its attempt."""
        ...

    @property
    def every_seconds(self) -> float:
        """The pause between two questions."""
        ...


Q = TypeVar("Q", bound=Question)
R = TypeVar("R")
Ask = Callable[[Q, str], Awaitable[R]]
"""(question, token) -> the report; raises Unanswered."""

Note = Callable[[Answer[R], R, datetime], Answer[R]]
"""(what was known, the report, now) -> what is known."""


def simply(before: Answer[R], report: R, now: datetime) -> Answer[R]:
    """The report is all that is known."""
    return Answer(report=report)


def pause(every_seconds: float, pods: int, *, unreachable: bool) -> float:
    """Seconds between two questions to one of so many pods.

    Where there are many, those that answer and that nobody waits for are asked less often.
    """
    if unreachable or every_seconds <= WAITED_FOR_SECONDS:
        return every_seconds
    return max(every_seconds, pods / REQUESTS_PER_SECOND)


def turn(now: float, last: float) -> float:
    """When a pod that is new to this process is asked for the first time, if the one before is at `last`.

    An operator that starts over many pods does not ask all of them at once.
    """
    return max(now, last + 1 / REQUESTS_PER_SECOND)


@dataclass(slots=True)
class _Target(Generic[Q, R]):
    poll: Q
    token: str
    answer: Answer[R] = field(default_factory=Answer)
    timer: asyncio.TimerHandle | None = None
    """Set between two questions."""
    task: asyncio.Task[None] | None = None
    """Set while a question is being asked."""


def _place(poll: Question) -> tuple[str, str, int]:
    return poll.ip, poll.pod_uid, poll.attempt


class Poller(Generic[Q, R]):
    """Asks a pod for each object that has one; wakes the object when the answer is another one than before.

    Between two questions a pod costs a timer and no task: there may be thousands.
    """

    def __init__(
        self, ask: Ask[Q, R], wake: Callable[[Key], None], now: Now, lateness: Lateness, note: Note[R] = simply
    ) -> None:
        self._ask = ask
        self._lateness = lateness
        self._note = note
        self._wake = wake
        self._now = now
        self._targets: dict[Key, _Target[Q, R]] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._turn = 0.0

    def want(self, key: Key, poll: Q | None, token: str = "") -> None:
        """From now on asks this pod, or nobody."""
        target = self._targets.get(key)
        if target and poll and _place(poll) == _place(target.poll):
            if poll != target.poll:
                target.poll = poll
                if target.timer:
                    target.timer.cancel()
                    self._begin(key, target)
            return
        if target:
            self._drop(target)
            del self._targets[key]
        if poll:
            target = self._targets[key] = _Target(poll, token)
            seconds = 0.0
            if poll.every_seconds > WAITED_FOR_SECONDS:
                now = asyncio.get_running_loop().time()
                self._turn = turn(now, self._turn)
                seconds = self._turn - now
            self._after(seconds, key, target)

    def answer(self, key: Key, pod_uid: str) -> Answer[R]:
        """What is known of the server in this pod."""
        target = self._targets.get(key)
        return target.answer if target and target.poll.pod_uid == pod_uid else Answer()

    def _pause(self, target: _Target[Q, R]) -> float:
        unreachable = target.answer.unreachable_since is not None
        return pause(target.poll.every_seconds, len(self._targets), unreachable=unreachable)

    def _after(self, seconds: float, key: Key, target: _Target[Q, R]) -> None:
        target.timer = asyncio.get_running_loop().call_later(seconds, self._begin, key, target)

    def _begin(self, key: Key, target: _Target[Q, R]) -> None:
        target.timer = None
        target.task = asyncio.create_task(self._question(key, target))

    async def _question(self, key: Key, target: _Target[Q, R]) -> None:
        async with self._slots:
            asked, before = target.poll, target.answer
            try:
                report = await self._heard(target)
                if report is not None:
                    target.answer = self._note(before, report, self._now())
            except Unanswered as error:
                since = before.unreachable_since or self._now()
                target.answer = replace(before, unreachable_since=since, problem=str(error))
            except Exception as error:
                # A question that was the last one would leave the last answer standing for ever.
                log.exception("defect", namespace=key.namespace, name=key.name)
                since = before.unreachable_since or self._now()
                target.answer = replace(before, unreachable_since=since, problem=type(error).__name__)
        if target.answer != before:
            self._wake(key)
        target.task = None
        self._after(self._pause(target) if target.poll == asked else 0.0, key, target)

    @staticmethod
    def _drop(target: _Target[Q, R]) -> None:
        if target.timer:
            target.timer.cancel()
        if target.task:
            target.task.cancel()

    async def _heard(self, target: _Target[Q, R]) -> R | None:
        """The report; None if this process was too late itself to hear one. Raises Unanswered."""
        loop = asyncio.get_running_loop()
        begin, late = loop.time(), self._lateness.seconds()
        try:
            return await self._ask(target.poll, target.token)
        except Silent:
            if silence.tells(loop.time() - begin, self._lateness.seconds() - late):
                raise
            UNHEARD.inc()
            return None

    async def close(self) -> None:
        """Stops asking."""
        tasks = [target.task for target in self._targets.values() if target.task]
        for target in self._targets.values():
            self._drop(target)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._targets.clear()
