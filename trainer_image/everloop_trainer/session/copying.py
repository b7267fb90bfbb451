"""Which stored states are to have copies elsewhere: checkpoints that are listed, and each model's newest snapshot.

What `copy_weights` made shares a file here and has one of its own there, so that each comes back without the other.
External weights have none: they are copies themselves, of what a model was, and meant to be taken elsewhere.

Whoever makes the copies is told the whole set again and again, and works off the difference at its own pace. Nothing
waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from everloop_trainer.session.context import Context
from everloop_trainer.session.history import Checkpoint, History
from everloop_trainer.session.ports import Copies, Shared, StateRef
from everloop_trainer.session.recovery import usable

INTERVAL = 1.0
"""Seconds between two looks at what there is."""


def wanted(history: History, newest: Mapping[str, str]) -> list[StateRef]:
    """The states to copy, what a user saved first. Pure.

    Args:
        history: all facts.
        newest: by model: key of its newest snapshot that counts.
    """
    listed = [each for each in history.checkpoints.values() if each.stored.kind != "external_weights"]
    saved = sorted(listed, key=lambda checkpoint: checkpoint.stored.time, reverse=True)
    states = [StateRef(each.stored.kind, each.model_id, each.stored.key, _shared(history, each)) for each in saved]
    return states + [StateRef("snapshots", model, newest[model]) for model in history.models if model in newest]


def _shared(history: History, checkpoint: Checkpoint) -> Shared | None:
    run = history.copied.get(checkpoint.model_id)
    return None if run is None else Shared(run.holder, run.source, run.time)


class Copying:
    """Tells `copies` what there is to copy.

    Args:
        context: shared with the service.
        copies: who makes them.
        taken: by model: key of the newest snapshot of this incarnation.
    """

    def __init__(self, context: Context, copies: Copies, taken: Mapping[str, str]) -> None:
        self._context = context
        self._copies = copies
        self._taken = taken
        self._found: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled. Raises Fenced or StorageFailed."""
        history = self._context.history
        for name in list(history.models):
            stored = usable(history.streams[name], await self._context.states.snapshots(name))
            if stored:
                self._found[name] = stored[0].key
        while True:
            self._copies.want(*self._wanted())
            await asyncio.sleep(INTERVAL)

    async def finish(self) -> None:
        """Have copied what there is now, also snapshots that would have to wait their turn; ends when that is done."""
        await self._copies.finish(*self._wanted())

    def _wanted(self) -> tuple[list[StateRef], set[str]]:
        history = self._context.history
        return wanted(history, self._newest()), {*history.models, *history.rolled_back, *history.copied}

    def _newest(self) -> dict[str, str]:
        newest = dict(self._found)
        for name, model in self._context.history.models.items():
            if model.root is not None and name not in newest:
                newest[name] = model.root
        return newest | dict(self._taken)
