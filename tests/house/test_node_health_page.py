"""docs/node-health.md says of each rule what the chart's profiles say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.house.tree import REPOSITORY

PROFILES = sorted((REPOSITORY / "helm" / "everloop" / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("profile", PROFILES, ids=[path.stem for path in PROFILES])
def test_each_rule_has_its_row(profile: Path) -> None:
    """Name, key, meaning, severity and source stand in one row below the profile's heading."""
    page = (REPOSITORY / "docs" / "node-health.md").read_text()
    section = page.split(f"\n## {profile.stem}\n")[1].split("\n## ")[0]
    rules = yaml.safe_load(profile.read_text())
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(rules)
    for rule, row in zip(rules, rows, strict=True):
        for said in (rule["name"], rule.get("key", ""), rule["meaning"], rule["severity"], rule["source"]):
            assert said in row, rule["name"]
