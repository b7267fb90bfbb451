"""An operator that starts anew over 10,000 sessions which serve: how soon it rests, what it needs, and what it asks.

API server and store are real, the trainers one program. The operator's calls are counted in the API server's audit log.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.bench.measure import Measure
from tests.operator.world import eventually
from tests.scale.restart import USER, Stage, come_to_rest, stage

SESSIONS, NODES = 10_000, 1_000
GOAL_SECONDS, GOAL_MIB = 10.0, 200.0
QUIET_SECONDS = 60.0
PATIENCE_SECONDS = 120.0


def run(place: Path) -> list[Measure]:
    """Raises AssertionError if the operator does not come to rest, or does not replace what is lost."""
    with stage(place, SESSIONS, NODES) as there:
        rest = come_to_rest(there)
        cpu = there.operator.cpu_seconds()
        peak = there.operator.mib("VmHWM")
        there.log.read(USER)
        busy = there.operator.cpu_seconds()
        time.sleep(QUIET_SECONDS)
        busy = (there.operator.cpu_seconds() - busy) / QUIET_SECONDS
        still = [call for call in there.log.read(USER) if call.writes]
        resident = there.operator.mib("VmRSS")
        foreign, own = _lose_a_node(there)
    over = f"{SESSIONS:,} sessions"
    return [
        Measure(f"restart over {over}: first list until the last call", rest.seconds, "s", GOAL_SECONDS),
        Measure(f"restart over {over}: CPU time from the start until every pod was asked", cpu, "s"),
        Measure(f"restart over {over}: calls", len(rest.calls), ""),
        Measure(f"restart over {over}: writes", sum(call.writes for call in rest.calls), "", 0),
        Measure(f"operator over {over}: resident memory", resident, "MiB", GOAL_MIB),
        Measure(f"operator over {over}: resident memory, greatest", peak, "MiB"),
        Measure(f"operator over {over}: writes in a quiet minute", len(still), "", 0),
        Measure(f"operator over {over}: CPU in a quiet minute", busy, "cores"),
        Measure(f"one node of {NODES:,} lost: calls for sessions that it did not host", foreign, "", 0),
        Measure(f"one node of {NODES:,} lost: calls for sessions that it hosted", own, ""),
    ]


def _lose_a_node(there: Stage) -> tuple[int, int]:
    """How many calls name sessions that were not on it, and how many name those that were."""
    node = there.fleet.nodes[7]
    hosted = there.fleet.hosted(node)
    there.log.read(USER)
    there.world.set_ready(node, "Unknown")
    eventually("new attempts", lambda: there.fleet.replaced(hosted), PATIENCE_SECONDS)
    time.sleep(QUIET_SECONDS / 6)
    named = there.fleet.named(there.log.read(USER))
    return sum(name not in hosted for name in named), sum(name in hosted for name in named)
