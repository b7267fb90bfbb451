"""Asks the servers of session pods for their reports, at their own pace: a pod that does not answer delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from everloop_operator.core.observed import Trainer
from everloop_operator.core.plan import Poll

from .ports import Key, Now, TrainerStatus, Unanswered

log = structlog.get_logger()

CONCURRENT_REQUESTS = 64


@dataclass(slots=True)
class _Target:
    poll: Poll
    token: str
    trainer: Trainer = field(default_factory=Trainer)
    task: asyncio.Task[None] | None = None


def _place(poll: Poll) -> tuple[str, str, int]:
    return poll.ip, poll.pod_uid, poll.attempt


class Poller:
    """One task per session that has a pod to ask; wakes the session when the answer is another one than before."""

    def __init__(self, status: TrainerStatus, wake: Callable[[Key], None], now: Now) -> None:
        self._status = status
        self._wake = wake
        self._now = now
        self._targets: dict[Key, _Target] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

    def want(self, key: Key, poll: Poll | None, token: str = "") -> None:
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

    def trainer(self, key: Key, pod_uid: str) -> Trainer:
        """What is known of the server in this pod."""
        target = self._targets.get(key)
        return target.trainer if target and target.poll.pod_uid == pod_uid else Trainer()

    async def _follow(self, key: Key, target: _Target) -> None:
        while True:
            before = target.trainer
            try:
                async with self._slots:
                    report = await self._status.ask(target.poll.ip, target.token, snapshot=target.poll.snapshot)
                target.trainer = Trainer(report=report)
            except Unanswered as error:
                since = before.unreachable_since or self._now()
                target.trainer = replace(before, unreachable_since=since, problem=str(error))
            except Exception as error:
                # A task that ended here would leave the last answer standing for ever.
                log.exception("defect", namespace=key.namespace, session=key.name)
                since = before.unreachable_since or self._now()
                target.trainer = replace(before, unreachable_since=since, problem=type(error).__name__)
            if target.trainer != before:
                self._wake(key)
            await asyncio.sleep(target.poll.every_seconds)

    async def close(self) -> None:
        """Stops asking."""
        tasks = [target.task for target in self._targets.values() if target.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._targets.clear()
