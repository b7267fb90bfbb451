"""Nodes as public sources have them (tests/operator/nodes), through all rules of the chart to what is decided."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from everloop_operator.core import node_rules
from tests.operator.builders import NOW
from tests.operator.test_node_rules import EVERY_RULE

NODES = Path(__file__).parent / "nodes"
DECISIONS = {
    "aks-healthy": ("", ""),
    "aks-starting": ("node-network-unavailable", "Avoid"),
    "eks-dcgm": ("eks-accelerator", "CheckpointThenMove"),
    "nvsentinel-healthy": ("", ""),
    "nvsentinel-thermal": ("nvsentinel-gpu", "Avoid"),
    "nvsentinel-xid": ("nvsentinel-xid", "CheckpointThenMove"),
}


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_what_is_decided(name: str) -> None:
    """The worst rule that counts once its signal has lasted, with every profile on; '' for a healthy node."""
    found = node_rules.signals(yaml.safe_load((NODES / f"{name}.yaml").read_text()), EVERY_RULE, now=NOW)
    worst = node_rules.active(found, NOW + timedelta(days=1))
    assert ((worst.rule, worst.severity.value) if worst else ("", "")) == DECISIONS[name]


def test_every_node_has_its_decision_and_its_source() -> None:
    """In the table above, and in the table of the README beside them."""
    files = {path.stem for path in NODES.glob("*.yaml")}
    assert files == set(DECISIONS)
    readme = (NODES / "README.md").read_text()
    assert all(f"`{name}.yaml`" in readme for name in files)
