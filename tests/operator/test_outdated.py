"""A CustomResourceDefinition that is older than the operator: nothing is changed, and it is said once."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import crd, names
from everloop_operator.api.served import lacking
from everloop_operator.loop.cache import Cache
from everloop_operator.loop.ports import Key
from everloop_operator.loop.read_only import ReadOnlyPass
from tests.operator import control_plane
from tests.operator.conftest import OPERATOR_TOKEN, grant, served
from tests.operator.one_cluster import OneCluster, clock
from tests.operator.world import SESSIONS, Api, Operator, eventually, free_address, session_body

KEY = Key("team", "tuned")


def schema() -> dict[str, Any]:
    return dict(crd.training_session_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def without(*path: str) -> dict[str, Any]:
    """The schema of a version that did not have this field."""
    older = copy.deepcopy(schema())
    place = older
    for name in path[:-1]:
        place = place["items"] if name == "[]" else place["properties"][name]
    del place["properties"][path[-1]]
    return older


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("status", "rest"), "status.rest"),
        (("spec", "idle"), "spec.idle"),
        (("spec", "idle", "onCall"), "spec.idle.onCall"),
        (("status", "recoveries", "[]", "rule"), "status.recoveries[].rule"),
        (("status",), "status"),
    ],
)
def test_what_an_older_schema_lacks(path: tuple[str, ...], named: str) -> None:
    """By the outermost field; a newer one, which has more, lacks nothing."""
    assert lacking(schema(), without(*path)) == [named]
    assert lacking(without(*path), schema()) == []


def test_words_that_an_older_schema_lacks() -> None:
    """What it would refuse; a field that is any word there lacks none."""
    older = copy.deepcopy(schema())
    phase = older["properties"]["status"]["properties"]["phase"]
    phase["enum"].remove("Queued")
    assert lacking(schema(), older) == ["status.phase: Queued"]
    assert lacking(older, schema()) == []
    del phase["enum"]
    assert lacking(schema(), older) == []


async def test_nothing_but_an_event() -> None:
    """However often the object is looked at: no pod, no status, one warning that names the fields."""
    cluster, cache = OneCluster(), Cache(clock)
    cache.put(cluster.add(session_body(KEY.name)))
    passes = ReadOnlyPass(cluster, cache, names.TRAINING_SESSION_KIND, ["status.rest", "spec.idle"], clock)
    for _ in range(3):
        assert await passes.reconcile(KEY) is None
    assert cluster.written == []
    [event] = cluster.events
    assert (event.type, event.reason) == ("Warning", names.EVENT_SCHEMA_OUTDATED)
    assert "lacks status.rest, spec.idle" in event.message
    assert await passes.reconcile(Key("team", "gone")) is None


@pytest.mark.slow
def test_an_operator_before_an_older_definition(tmp_path: Path) -> None:
    """It lives, writes nothing but its warning, and ends once the definition is updated: the next process goes on."""
    with (
        control_plane.running(tmp_path, (f"{OPERATOR_TOKEN},everloop-operator,2",)) as plane,
        closing(Api(plane)) as api,
    ):
        older = crd.training_session_crd()
        older["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = without("status", "rest")
        for definition in (older, crd.rl_job_crd()):
            api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        for plural in ("trainingsessions", "rljobs"):
            eventually(plural, partial(served, api, f"{SESSIONS}/{plural}"))
        grant(api)
        path = f"{SESSIONS}/namespaces/default/{names.TRAINING_SESSION_PLURAL}"
        eventually("a session", lambda: api.request("POST", path, session_body(KEY.name)).status_code == 201)
        kubeconfig = plane.write_kubeconfig(tmp_path / "operator.kubeconfig", OPERATOR_TOKEN)
        operator = Operator(kubeconfig, tmp_path / "operator.log", free_address(2))
        operator.start()
        try:
            [told] = eventually("the warning", lambda: warnings(api), 30)
            assert told["reason"] == names.EVENT_SCHEMA_OUTDATED
            assert "lacks status.rest" in told["message"]
            assert "status" not in api.items(path)[0]
            update(api)
            assert operator.ended(60) == 0
            operator.start()
            eventually("a pod", lambda: api.items("/api/v1/namespaces/default/pods"), 30)
        finally:
            operator.stop()


def warnings(api: Api) -> list[dict[str, Any]]:
    """Of sessions: an API server tells there of its own service as well."""
    found = api.items("/api/v1/namespaces/default/events")
    return [event for event in found if event["involvedObject"]["kind"] == names.TRAINING_SESSION_KIND]


def update(api: Api) -> None:
    """The definition of this version takes the place of the older one."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingsessions.everloop.dev"
    api.merge(path, {"spec": crd.training_session_crd()["spec"]})
