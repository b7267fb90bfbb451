"""Probes: each makes one call of the SDK as a user would, and looks at its effect through another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from tests.conformance.sdk.world import NotObserved, World

Run = Callable[[World], None]
P = ParamSpec("P")
PROBES: dict[str, Probe] = {}
"""By row."""


@dataclass(frozen=True)
class Probe:
    """One row's.

    Attributes:
        run: raises what the SDK raises, or NotObserved.
        seen: what is seen of its effect, and through which call.
        reason: why it is refused, where it is.
    """

    run: Run
    seen: str
    reason: str | None


def probe(row: str, seen: str, refused: str | None = None) -> Callable[[Run], Run]:
    """Makes a function the probe of a row."""

    def registered(run: Run) -> Run:
        assert row not in PROBES, row
        PROBES[row] = Probe(run, seen, refused)
        return run

    return registered


def outcome(row: str, world: World) -> dict[str, Any]:
    """What becomes of a row: served, refused, untested, or failed where a call did neither as it should."""
    if row not in PROBES:
        return {"row": row, "state": "untested"}
    asked = PROBES[row]
    try:
        asked.run(world)
    except NotObserved as missing:
        return {"row": row, "state": "failed", "message": str(missing)}
    except Exception as error:  # noqa: BLE001 (whatever a user would see is told)
        state = "failed" if asked.reason is None else "refused"
        return {"row": row, "state": state, "message": shown(error), "reason": asked.reason}
    return {"row": row, "state": "served", "seen": asked.seen, "reason": asked.reason}


def shown(error: BaseException) -> str:
    """What a user sees of an exception, without what differs from run to run."""
    text = " ".join(str(part) for part in (error, vars(error).get("details")) if part)
    text = re.sub(r"s-[0-9a-f]{16}-[0-9a-f]{16}", "SESSION", " ".join(text.split()))
    text = re.sub(r" for self\.request_id=.*", "", text)  # counts what this process had asked before
    return f"{type(error).__name__}: {text}"
