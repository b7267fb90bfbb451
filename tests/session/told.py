"""Copies that are never made."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from everloop_trainer.session.ports import StateRef
from everloop_trainer.session.status import CopiesReport


class Told:
    """What was wanted last; what is wanted for the last time is done once a test says so."""

    def __init__(self) -> None:
        self.states: list[StateRef] = []
        self.models: set[str] = set()
        self.report = CopiesReport(pending=3, error="away")
        self.finishing = False
        self.done = asyncio.Event()

    def want(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        self.states, self.models = list(states), set(models)

    async def finish(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        self.want(states, models)
        self.finishing = True
        await self.done.wait()

    async def run(self) -> None:
        await asyncio.Event().wait()
