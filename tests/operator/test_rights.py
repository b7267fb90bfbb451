"""The API server's audit log over what the operator does: no right is missing, and none is granted in vain."""

from __future__ import annotations

import pytest

from everloop_operator.api import names
from everloop_operator.cluster.rbac import NAMESPACE_RULES, NODE_RULES, RELEASE_RULES, Rule
from tests.operator.control_plane import ControlPlane
from tests.operator.faults.journeys import JobJourney, Journey
from tests.operator.test_claims_on_cluster import bind
from tests.operator.world import RELEASE, Operator, World, eventually, session_body
from tests.scale.audit import AuditLog, Entry

USER = "everloop-operator"
CREATED = 201
IN_ADMISSION = {
    (names.GROUP, f"{plural}/finalizers", "update") for plural in (names.RL_JOB_PLURAL, names.TRAINING_SESSION_PLURAL)
}
"""Asked for by an admission plugin while an owner reference is written: no call of its own shows it."""

pytestmark = pytest.mark.slow


def claim_from_template(world: World) -> None:
    """A claim is made, waits, and is bound to a volume."""
    template = {"accessModes": ["ReadWriteMany"], "size": "1Gi"}
    world.create_session("claims", storage={"journal": {"claimTemplate": template}})
    eventually("the claim", lambda: world.api.get(world.path("persistentvolumeclaims", "claims-journal")))
    bind(world, "claims-journal", csi={"driver": "fsx.csi.aws.com", "volumeHandle": world.namespace})
    eventually("the volume", lambda: world.condition(names.CONDITION_VOLUMES_READY, "claims").get("status") == "True")


def finished_session_of_the_gateway(world: World) -> None:
    """It goes by its TTL."""
    body = session_body("over", stop=True, ttlSecondsAfterFinished=1)
    body["metadata"]["labels"] = {names.LABEL_CREATED_BY: names.CREATED_BY_GATEWAY}
    world.api.create(world.sessions_path, body)
    world.wait_phase(names.PHASE_STOPPED, "over")
    world.api.merge(f"{world.sessions_path}/over", {"metadata": {"annotations": {"a": "signal"}}})
    eventually("the end", lambda: world.api.get(f"{world.sessions_path}/over") is None)


def lost_while_the_operator_was_away(world: World, operator: Operator) -> None:
    """What a status names and no list shows is asked for by its name before it counts as lost."""
    node = world.node("gone")
    world.create_session("lost")
    world.run_pod("lost-a1-0", node)
    world.wait_phase(names.PHASE_RUNNING, "lost")
    assert operator.stop() == 0
    world.remove_pod("lost-a1-0")
    world.api.delete(f"/api/v1/nodes/{node}")
    operator.start()
    world.wait_pod("lost-a2-0")


Right = tuple[bool, str, str, str]
"""Whether it is one in the release namespace; API group, resource, verb."""


def rights(call: Entry) -> set[Right]:
    """What a call has needed: an apply that makes its object needs two."""
    verbs = {call.verb} | ({"create"} if (call.verb, call.code) == ("patch", CREATED) else set())
    return {(call.namespace == RELEASE, call.group, call.resource, verb) for verb in verbs}


def granted(rules: tuple[Rule, ...], *, release: bool = False) -> set[Right]:
    return {(release, rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs}


def test_every_right_is_used_and_none_is_missing(world: World, operator: Operator, plane: ControlPlane) -> None:
    """The difference between what is granted and what is asked for is empty both ways."""
    Journey(world).run()
    job = JobJourney(world, nodes=("c", "d"))
    job.run()
    job.end()
    claim_from_template(world)
    finished_session_of_the_gateway(world)
    lost_while_the_operator_was_away(world, operator)
    calls = [call for call in AuditLog(plane.audit_log).read(USER) if call.resource]
    ours = (world.namespace, RELEASE, "")  # in others, other tests have had pods refused by admission
    assert [str(call) for call in calls if call.code == 403 and call.namespace in ours] == []
    used = set().union(*(rights(call) for call in calls))
    given = granted((*NAMESPACE_RULES, *NODE_RULES)) | granted(RELEASE_RULES, release=True)
    assert sorted(given - used) == sorted((False, *right) for right in IN_ADMISSION)
    assert sorted(used - given) == []
