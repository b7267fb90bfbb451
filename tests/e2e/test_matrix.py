"""The promise, with real processes killed under a loop of the unmodified SDK: each victim once, each in another moment.

``make acceptance`` strikes every victim in every moment.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from demo.session import NAME
from tests.e2e.world import NAMESPACE, Everloop
from tests.matrix.acts import Act, Acts
from tests.matrix.moments import OF_THE_LOOP
from tests.matrix.play import Cell, Struck
from tests.matrix.stage import Stage
from tests.matrix.victims import NEW_ATTEMPT, Victim

pytestmark = pytest.mark.cluster


def deal(rng: random.Random) -> list[Cell]:
    """A moment for each victim; none is dealt again before all were."""
    victims, moments = rng.sample(list(Victim), len(Victim)), rng.sample(OF_THE_LOOP, len(OF_THE_LOOP))
    return [Cell(victim, moments[i % len(moments)]) for i, victim in enumerate(victims)]


@dataclass(frozen=True)
class Story:
    """What happened, what the session's status says of it, and the words of `kubectl describe`."""

    act: Act
    journal: list[dict[str, Any]]
    recoveries: list[dict[str, Any]]
    describe: str

    def struck(self, victim: Victim) -> Struck:
        """The kill that hit a victim."""
        return next(met for met in self.act.struck if met.cell.victim == victim)


@pytest.fixture(scope="module")
def story(everloop: Everloop, seed: int) -> Story:
    """One loop through every fault, and the same loop unbroken."""
    rng = random.Random(seed)
    cells = deal(rng)
    print(*(f"{cell.victim} in {cell.moment}" for cell in cells), sep="\n")
    act = Acts(Stage(everloop, rng), lambda cell, met: print(cell, met)).play("broken", cells)
    session = everloop.session
    describe = session.tools.kube("-n", NAMESPACE, "describe", "tsess", NAME)
    return Story(act, session.journal(), session.status()["recoveries"], describe)


def test_every_operation_happened_once_and_all_adapters_equal_those_of_an_unbroken_run(story: Story) -> None:
    """What was told, sampled and saved is bit-equal; nothing is twice in the lineage; the killed was replaced."""
    assert story.act.wrong == (), json.dumps(story.recoveries)  # as text: pytest shortens other values


@pytest.mark.parametrize("victim", Victim)
def test_each_victim_was_struck_in_its_moment(story: Story, victim: Victim) -> None:
    """The journal proved the moment, or there would be no kill to find."""
    assert story.struck(victim).seconds >= 0


@pytest.mark.parametrize("victim", [Victim.NODE, Victim.PARTITION, Victim.FREEZE])
def test_status_tells_which_node_was_lost(story: Story, victim: Victim) -> None:
    """Which node, why, from where, nothing lost, in how many seconds."""
    met = story.struck(victim)
    entry = next(e for e in story.recoveries if e["node"] == met.node and e["attempt"] == met.attempt + 1)
    assert entry["reason"] == "NodeLost"
    assert entry["resumedFrom"]
    assert entry["lostOperations"] == 0
    assert float(entry["seconds"]) > 0
    assert met.node in story.describe


@pytest.mark.parametrize("victim", [Victim.PARTITION, Victim.FREEZE])
def test_zombie_cannot_write_into_the_lineage(story: Story, everloop: Everloop, victim: Victim) -> None:
    """A pod that lived on met the fence; what it wrote, if so, lies behind its seal."""
    met = story.struck(victim)
    successor = next(r for r in story.journal if r["t"] == "open" and r["n"] == met.incarnation + 1)
    sealed = next(s["length"] for s in successor["seals"] if s["incarnation"] == met.incarnation)
    written = (everloop.session.lineage_root / "journal" / f"{met.incarnation:08d}.log").stat().st_size
    assert written >= sealed
    if victim == Victim.PARTITION:  # a thawed kubelet may end its pod before that has said a word
        assert f"incarnation {met.incarnation} is superseded by incarnation {met.incarnation + 1}" in met.words


def test_describe_tells_the_story(story: Story) -> None:
    """Events name the lost node, the new attempt and the recovery."""
    for word in ("NodeLost", "NewAttempt", "Recovered", "replayed", "lost 0"):
        assert word in story.describe, story.describe


def test_moments_are_dealt_evenly_and_by_seed() -> None:
    """Each victim has one moment, each moment a victim; another seed deals otherwise."""
    cells = deal(random.Random(1))
    assert sorted(cell.victim for cell in cells) == sorted(Victim)
    assert {cell.moment for cell in cells} == set(OF_THE_LOOP)
    assert cells == deal(random.Random(1)) != deal(random.Random(2))
    assert set(Victim) > NEW_ATTEMPT
