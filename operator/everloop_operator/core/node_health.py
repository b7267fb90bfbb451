"""Whether a pod has to leave a node that still runs, by what the installation's rules find at that node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from . import node_rules
from .node_rules import DRAIN, Severity, Signal
from .observed import Node, Observed, Pod

FLEET_FLOOR = 2
"""So many nodes are always left when their rules say so, however small the fleet is."""
MOST_AVOIDED = 64
"""Nodes that a pod prefers not to run on: a longer list would only bloat the pod."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the worst signal of a pod's node asks for."""

    node: str
    signal: Signal
    held_back: bool
    """Whether so many nodes show signals that the rule is more likely at fault than they are."""

    @property
    def moves(self) -> bool:
        """Whether the pod has to leave."""
        return self.signal.severity.moves and not self.held_back

    @property
    def request(self) -> str:
        """Name of the request for snapshots that the verdict leads to."""
        return f"{self.signal.rule}-{self.signal.since.timestamp():.0f}"

    @property
    def message(self) -> str:
        """For people."""
        return f"node {self.node}: {self.signal.detail} (rule {self.signal.rule})"


def judge(observed: Observed, pod: Pod | None, fleet_cap: float) -> Verdict | None:
    """The verdict on the node of `pod`; None where nothing counts against it.

    A signal that counted already when the scheduler chose the node asks for nothing: no better node had room, and
    leaving it again would only lead back.
    """
    node = observed.nodes.get(pod.node) if pod and pod.node else None
    if node is None or pod is None:
        return None
    chosen = pod.scheduled or pod.created
    with_budget = observed.session.spec is not None and observed.session.spec.pod.disruption_budget
    signal = node_rules.active(
        [signal for signal in node.signals if signal.due >= chosen and (with_budget or signal.rule != DRAIN.name)],
        observed.now,
    )
    if signal is None:
        return None
    # Whoever drains nodes, however many, waits for the sessions.
    capped = signal.severity.moves and signal.rule != DRAIN.name
    return Verdict(node.name, signal, capped and beyond_cap(observed, fleet_cap))


def beyond_cap(observed: Observed, fleet_cap: float) -> bool:
    """Whether more of the nodes that host session pods are to be left than `fleet_cap` (0 to 1) allows."""
    hosting = [observed.nodes[name] for name in observed.hosting if name in observed.nodes]
    return to_leave(hosting, observed.now) > most_to_leave(len(hosting), fleet_cap)


def to_leave(hosting: Iterable[Node], now: datetime) -> int:
    """How many of these nodes show signals to leave them."""
    return sum(1 for _, signal in _flagged(hosting, now) if signal.severity.moves)


def most_to_leave(hosting: int, fleet_cap: float) -> int:
    """How many of so many nodes with session pods are left at a time."""
    return max(FLEET_FLOOR, int(fleet_cap * hosting))


def due(observed: Observed, pod: Pod | None) -> Iterator[datetime]:
    """When time alone may change the verdict."""
    node = observed.nodes.get(pod.node) if pod and pod.node else None
    coming = node_rules.due_at(node.signals, observed.now) if node else None
    if coming:
        yield coming


def checkpoint_deadline(verdict: Verdict, seconds: float) -> datetime:
    """Until when a pod that has to leave may go on writing snapshots."""
    return verdict.signal.due + timedelta(seconds=seconds)


def may_leave(observed: Observed, verdict: Verdict, checkpoint_seconds: float) -> bool:
    """Whether the next attempt may start: at once, or when the snapshots are written or would take too long."""
    if not verdict.moves:
        return False
    if verdict.signal.severity is Severity.MOVE_NOW:
        return True
    request = observed.trainer.report.snapshot_request if observed.trainer.report else None
    written = request is not None and request.id == verdict.request and request.pending == 0
    return written or observed.now >= checkpoint_deadline(verdict, checkpoint_seconds)


def avoided(observed: Observed) -> list[str]:
    """Hostnames of nodes against which something counts: others are preferred to them, the worst first."""
    found = [(signal.severity.rank, node.hostname) for node, signal in _flagged(observed.nodes.values(), observed.now)]
    return [hostname for _, hostname in sorted(found, key=lambda item: (-item[0], item[1]))[:MOST_AVOIDED]]


def _flagged(nodes: Iterable[Node], now: datetime) -> Iterator[tuple[Node, Signal]]:
    for node in nodes:
        signal = node_rules.active([signal for signal in node.signals if signal.rule != DRAIN.name], now)
        if signal:
            yield node, signal
