"""Asks the servers in pods for their reports, at their own pace: a pod that does not answer delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Generic, Protocol, TypeVar

import structlog

from everloop_operator.core.observed import Answer

from .ports import Key, Now, Unanswered

log = structlog.get_logger()

CONCURRENT_REQUESTS = 64


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


@dataclass(slots=True)
class _Target(Generic[Q, R]):
    poll: Q
    token: str
    answer: Answer[R] = field(default_factory=Answer)
    task: asyncio.Task[None] | None = None


def _place(poll: Question) -> tuple[str, str, int]:
    return poll.ip, poll.pod_uid, poll.attempt


class Poller(Generic[Q, R]):
    """One task per object that has a pod to ask; wakes the object when the answer is another one than before."""

    def __init__(self, ask: Ask[Q, R], wake: Callable[[Key], None], now: Now, note: Note[R] = simply) -> None:
        self._ask = ask
        self._note = note
        self._wake = wake
        self._now = now
        self._targets: dict[Key, _Target[Q, R]] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

    def want(self, key: Key, poll: Q | None, token: str = "") -> None:
        """From now on asks this pod, or nobody."""
        target = self._targets.get(key)
        if target and poll and _place(poll) == _place(target.poll):
            target.poll = poll
            return
        if target and target.task:
            target.task.cancel()
        self._targets.pop(key, None)
        if poll:
            target = self._targets[key] = _Target(poll, token)
            target.task = asyncio.create_task(self._follow(key, target))

    def answer(self, key: Key, pod_uid: str) -> Answer[R]:
        """What is known of the server in this pod."""
        target = self._targets.get(key)
        return target.answer if target and target.poll.pod_uid == pod_uid else Answer()

    async def _follow(self, key: Key, target: _Target[Q, R]) -> None:
        while True:
            before = target.answer
            try:
                async with self._slots:
                    report = await self._ask(target.poll, target.token)
                target.answer = self._note(before, report, self._now())
            except Unanswered as error:
                since = before.unreachable_since or self._now()
                target.answer = replace(before, unreachable_since=since, problem=str(error))
            except Exception as error:
                # A task that ended here would leave the last answer standing for ever.
                log.exception("defect", namespace=key.namespace, name=key.name)
                since = before.unreachable_since or self._now()
                target.answer = replace(before, unreachable_since=since, problem=type(error).__name__)
            if target.answer != before:
                self._wake(key)
            await asyncio.sleep(target.poll.every_seconds)

    async def close(self) -> None:
        """Stops asking."""
        tasks = [target.task for target in self._targets.values() if target.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._targets.clear()
