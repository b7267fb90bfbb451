"""What many sessions cost: the calls of an operator that starts anew, that rests, and that loses one node of many."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from everloop_operator.loop.claim_reader import PLACED_SECONDS
from tests.operator.world import eventually
from tests.scale.fleet import PER_NAMESPACE
from tests.scale.restart import USER, Rest, Stage, come_to_rest, stage

SESSIONS, NODES = 120, 12
CALLS_TO_START = 40
"""Lists, watches and the master key."""
CALLS_FOR_A_NAMESPACE = 4
"""The claims that its sessions share, as several passes ask for them at a time."""
QUIET_SECONDS = 5.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Rest]]:
    with stage(tmp_path_factory.mktemp("scale"), SESSIONS, NODES) as there:
        time.sleep(PLACED_SECONDS + 1)  # a claim that is read so soon after a pod was placed counts for that pod alone
        yield there, come_to_rest(there)


def test_a_restart_costs_lists_and_no_write(settled: tuple[Stage, Rest]) -> None:
    """Nothing that is as it should be is written again, and nothing is asked for each session."""
    _, rest = settled
    assert [str(call) for call in rest.calls if call.writes] == []
    namespaces = SESSIONS // PER_NAMESPACE
    assert len(rest.calls) <= CALLS_TO_START + namespaces * CALLS_FOR_A_NAMESPACE, list(map(str, rest.calls[-50:]))


def test_at_rest_nothing_is_asked(settled: tuple[Stage, Rest]) -> None:
    """While every pod serves, the API server hears nothing of the operator but its watches."""
    there, _ = settled
    there.log.read(USER)
    time.sleep(QUIET_SECONDS)
    assert [str(call) for call in there.log.read(USER) if call.verb != "watch"] == []


def test_a_lost_node_costs_calls_for_what_it_hosted(settled: tuple[Stage, Rest]) -> None:
    """Its sessions get new attempts, and no call names any other."""
    there, _ = settled
    node = there.fleet.nodes[7]
    hosted = there.fleet.hosted(node)
    there.log.read(USER)
    there.world.set_ready(node, "Unknown")

    eventually("new attempts", lambda: there.fleet.replaced(hosted), 60)
    time.sleep(QUIET_SECONDS)
    assert set(there.fleet.named(there.log.read(USER))) == hosted
