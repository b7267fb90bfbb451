"""Objects of other people that have the names of our children: they are left as they are, and it is said."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import names
from tests.operator import strangers
from tests.operator.world import World, eventually

pytestmark = pytest.mark.slow
PODS = {
    "metadata": {"name": "tuned-a1-0", "labels": {"app": "theirs"}},
    "spec": {"containers": [{"name": "theirs", "image": "theirs:1"}]},
}
SECRETS: dict[str, Any] = {"metadata": {"name": "tuned-a1-token"}, "data": {"token": "dGhlaXJz"}}
BUDGETS = {"metadata": {"name": "tuned-a1-0"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}


def test_a_peer_of_higher_priority_pauses_nothing(world: World) -> None:
    """The operator started beside the peering object, neither heeds it nor writes to it."""
    peering = world.api.get(f"{strangers.PEERINGS}/default")
    assert peering
    [peer] = peering["status"].values()
    assert peer["priority"] > 0
    world.claims()
    world.create_session()
    world.wait_pod("tuned-a1-0")


def collection(world: World, plural: str) -> str:
    if plural == "poddisruptionbudgets":
        return f"/apis/policy/v1/namespaces/{world.namespace}/{plural}"
    return world.path(plural)


@pytest.mark.parametrize(
    ("plural", "body"),
    [("pods", PODS), ("secrets", SECRETS), ("poddisruptionbudgets", BUDGETS)],
    ids=["Pod", "Secret", "PodDisruptionBudget"],
)
def test_what_is_not_ours_is_told_of_and_not_touched(world: World, plural: str, body: dict[str, Any]) -> None:
    """Neither adopted nor changed nor deleted; once it is out of the way the session goes on."""
    path = f"{collection(world, plural)}/{body['metadata']['name']}"
    theirs = world.api.create(collection(world, plural), body)
    world.claims()
    world.create_session(pod={"disruptionBudget": True})
    if plural == "poddisruptionbudgets":
        world.run_pod("tuned-a1-0", world.node("a"))  # a budget is made once the pod has been seen

    def told() -> bool:
        said = (world.status(), [event for event in world.events() if event["reason"] == names.EVENT_CHILD_REFUSED])
        return "exists already, and is not ours" in str(said)

    eventually("it is told", told)
    assert world.api.get(path) == theirs
    if plural == "poddisruptionbudgets":
        return
    world.api.delete(path, gracePeriodSeconds=0)
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": {"suspend": False, "idle": {"afterSeconds": 7200}}})
    world.wait_pod("tuned-a1-0")
    world.run_pod("tuned-a1-0", world.node("a"))
    world.wait_phase("Running")
    eventually("nothing is told any more", lambda: not told())
    mine = world.api.get(path)
    assert mine
    assert mine["metadata"]["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY


def test_what_took_the_name_of_an_old_token_stays(world: World) -> None:
    """Tokens are deleted with their attempts, but only if they are tokens."""
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session()
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    path = world.path("secrets", "tuned-a1-token")
    world.api.delete(path)
    theirs = world.api.create(world.path("secrets"), SECRETS)
    world.api.delete(world.path("pods", "tuned-a1-0"))
    world.run_pod("tuned-a2-0", second)
    world.wait_phase("Running")
    world.remove_pod("tuned-a1-0")
    world.api.delete(world.path("pods", "tuned-a2-0"))
    world.run_pod("tuned-a3-0", first)
    world.wait_phase("Running")
    world.remove_pod("tuned-a2-0")
    gone = world.path("secrets", "tuned-a2-token")
    eventually("the second token goes", lambda: world.api.get(gone) is None)
    assert world.api.get(path) == theirs
