"""The copier's work in turn: the next piece, what to do after a failure, and what to tell of it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from everloop_trainer.copies.bucket import CopyFailed
from everloop_trainer.copies.copier import Copier, Work
from everloop_trainer.copies.protocol import Wanted
from everloop_trainer.session.status import CopiesReport

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
IDLE = 2.0
"""Seconds after which something may be due without having been asked for."""
log = structlog.get_logger(__name__)


def delay(failures: int) -> float:
    """Seconds to wait after so many failures in a row. Pure."""
    return float(min(FIRST_DELAY * 2 ** (failures - 1), LONGEST_DELAY)) if failures else 0.0


class Working:
    """One step after another; what failed waits behind what did not. `tell` is called whenever the report changes."""

    def __init__(self, copier: Copier, tell: Callable[[CopiesReport], None]) -> None:
        self._copier = copier
        self._tell = tell
        self._failed: dict[Work | None, tuple[int, str]] = {}
        self._failures = 0
        self._told: CopiesReport | None = None
        self._last = False

    def step(self, wanted: Wanted) -> float:
        """Does the next piece of work. Returns seconds until the next step; raises Fenced."""
        work: Work | None = None
        if wanted.last and not self._last:
            self._last, self._failures = True, 0
            self._failed.clear()
        try:
            if not self._copier.begun:
                self._copier.begin()
            todo = self._copier.due(wanted)
            work = min(todo, key=lambda each: self._failed.get(each, (0, ""))[0], default=None)
            if work is not None:
                self._report(wanted)
                self._copier.do(work)
        except (CopyFailed, OSError) as error:
            self._failures += 1
            count, said = self._failed.get(work, (0, ""))
            if said != str(error):
                log.warning("not copied: it is tried again", error=str(error))
            self._failed[work] = count + 1, str(error)
            self._report(wanted)
            return delay(self._failures)
        self._failures = 0
        self._failed.pop(None, None)
        self._failed.pop(work, None)
        self._failed = {failed: why for failed, why in self._failed.items() if failed in todo}
        self._report(wanted)
        return 0.0 if work is not None else IDLE

    def _report(self, wanted: Wanted) -> None:
        error = next((why for _, why in self._failed.values()), "")
        finished = wanted.last and self._tried_all(wanted)
        report = CopiesReport(self._copier.pending(wanted), self._copier.last_time, error, finished)
        if report != self._told:
            self._told = report
            self._tell(report)

    def _tried_all(self, wanted: Wanted) -> bool:
        if not self._copier.begun:
            return None in self._failed
        return all(work.remove or work in self._failed for work in self._copier.due(wanted))
