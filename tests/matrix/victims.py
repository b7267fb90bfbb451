"""What is killed, and what has to have been replaced afterwards. Pure."""

from __future__ import annotations

from enum import StrEnum

from tests.matrix.moments import QUIET, Facts, Key, Moment


class Victim(StrEnum):
    """What a kill hits."""

    ENGINE = "engine"
    SPARE = "spare"
    SERVER = "server"
    SUPERVISOR = "supervisor"
    """PID 1 of the container, and with it all its processes; the kubelet starts it again."""
    POD = "pod"
    NODE = "node"
    PARTITION = "partition"
    """The node is cut off, and its pod lives on: see `SERVES_ON`."""
    FREEZE = "freeze"
    """Every process of the node stops, the operator too, and goes on once another pod has taken over."""
    OPERATOR = "operator"
    GATEWAY = "gateway"
    """One replica; where only the one that carries the call counts, all of them."""
    API_SERVER = "kube-apiserver"
    ETCD = "etcd"


NEW_ATTEMPT = frozenset({Victim.POD, Victim.NODE, Victim.PARTITION, Victim.FREEZE})
NEW_INCARNATION = NEW_ATTEMPT | {Victim.SERVER, Victim.SUPERVISOR}
NEW_ENGINE = NEW_INCARNATION | {Victim.ENGINE}
CONTROL_PLANE = frozenset({Victim.API_SERVER, Victim.ETCD})
"""While these are away nodes may seem lost, and the session may move."""
BESIDE = CONTROL_PLANE | {Victim.OPERATOR, Victim.GATEWAY}
"""Outside of the session's pod."""
SERVES_ON = QUIET | {Moment.FORWARD_BACKWARD, Moment.SAMPLE, Moment.CREATION}
"""Moments in which a cut-off server serves on while its engine stands still until there is a successor.

In the others the server stands still, with the engine's result to write then.
"""


def oddities(victim: Victim, moment: Moment, before: Facts, after: Facts, keys: list[Key]) -> list[str]:
    """What was not replaced although it was killed, or was although it was not.

    Args:
        victim: what was killed.
        moment: when.
        before: the journal at that instant.
        after: the journal once the loop had been told.
        keys: the operations that were under way.
    """
    found = []
    attempts, incarnations = after.attempt - before.attempt, after.incarnation - before.incarnation
    if victim not in CONTROL_PLANE:
        if attempts != (victim in NEW_ATTEMPT):
            found.append(f"attempt {before.attempt} became {after.attempt}")
        if (incarnations > 0) != (victim in NEW_INCARNATION):
            found.append(f"incarnation {before.incarnation} became {after.incarnation}")
    # A server that had only the result left to write does so without its engine.
    finishes = moment == Moment.AFTER_MANIFEST and victim == Victim.ENGINE
    if victim in NEW_ENGINE and moment not in QUIET and not finishes:
        again = [key for key in keys if not before.results[key] and before.tries[key]]
        found += [f"{key} was not tried again" for key in again if after.tries[key] <= before.tries[key]]
    return found
