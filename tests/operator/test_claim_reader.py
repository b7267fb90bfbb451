"""Which sessions share what was read of a claim."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from everloop_operator.core.observed import Pod
from everloop_operator.loop import resync
from everloop_operator.loop.claim_reader import BOUND_SECONDS, ClaimReader
from everloop_operator.loop.poller import pause
from everloop_operator.loop.ports import Key
from tests.operator.builders import NOW, ago, pod
from tests.operator.one_cluster import OneCluster

SESSIONS = [Key("team", f"tuned-{number}") for number in range(20)]


class Reading:
    """A reader over one cluster, and a clock that is set."""

    def __init__(self) -> None:
        self.cluster, self.time = OneCluster(), NOW
        self.reader = ClaimReader(self.cluster, self.now)

    def now(self) -> datetime:
        return self.time

    async def uids(self, *pods: Pod | None) -> list[str]:
        """The claim's UID, as each session with such a pod sees it."""
        pairs = zip(SESSIONS, pods, strict=False)
        found = await asyncio.gather(*(self.reader.read(key, "training", current) for key, current in pairs))
        return [claim.uid for claim in found if claim]


async def test_sessions_whose_pods_are_placed_share_one_read() -> None:
    """As when the operator starts anew: one call for a claim, and one more once that is too old."""
    reading = Reading()
    placed = [pod(number + 1) for number in range(len(SESSIONS))]
    assert len(await reading.uids(*placed)) == len(SESSIONS)
    assert reading.cluster.claims_read == 1
    await reading.uids(*placed)
    assert reading.cluster.claims_read == 1
    reading.time += timedelta(seconds=BOUND_SECONDS)
    await reading.uids(*placed)
    assert reading.cluster.claims_read == 2


async def test_a_pod_that_was_placed_afterwards_has_a_read_of_its_own() -> None:
    """Another claim may have taken the name in between; so it may while there is no pod."""
    reading = Reading()
    new = pod(1, scheduled=ago(1))
    first, second = await reading.uids(pod(2), new)
    [third] = await reading.uids(None)
    assert len({first, second, third}) == 3


def test_a_bound_claim_is_believed_until_the_next_resync() -> None:
    """Which reads it again; and until 10,000 pods have answered an operator that starts anew, which need no call."""
    assert pause(3.0, 10_000, unreachable=False) < BOUND_SECONDS < 0.9 * resync.PERIOD_SECONDS
