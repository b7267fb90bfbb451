"""Nodes that a pod is to keep away from, as a term of its node affinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everloop_operator.api import names

LONGEST_LABEL_VALUE = 63


def other_than(hostnames: Sequence[str]) -> dict[str, Any]:
    """The term that fits every node but these.

    By their label, because autoscalers that look for a node do not know `matchFields`. A hostname that is too long for
    a label is the name of a node that has no such label; the API server would refuse it as a label's value.
    """
    labelled = [hostname for hostname in hostnames if len(hostname) <= LONGEST_LABEL_VALUE]
    named = [hostname for hostname in hostnames if len(hostname) > LONGEST_LABEL_VALUE]
    term: dict[str, Any] = {}
    if labelled:
        term["matchExpressions"] = [{"key": names.NODE_HOSTNAME_LABEL, "operator": "NotIn", "values": labelled}]
    if named:
        # One value is all that a field may be compared with.
        term["matchFields"] = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in named]
    return term
