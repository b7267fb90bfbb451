"""The adapter of the API server: what it checks before anything is watched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio import client

from everloop_operator.api import names
from everloop_operator.cluster.kube import OURS, Kube
from everloop_operator.loop.ports import Absent, ClusterError, Conflict
from everloop_operator.loop.scope import Scope


class Answering(Kube):
    """An API server that serves every list, and names these resources of ours."""

    def __init__(self, *plurals: str) -> None:
        super().__init__(client.Configuration(), "everloop-system", Scope())
        self.plurals = plurals

    async def _call(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        return {"resources": [{"name": plural} for plural in self.plurals]} if path == OURS else {"items": []}


async def test_kind_that_is_served_and_not_listed_yet_is_waited_for() -> None:
    """What is watched is found by the list when the process starts: a kind that is missing would never be seen."""
    early = Answering(names.TRAINING_SESSION_PLURAL, f"{names.TRAINING_SESSION_PLURAL}/status")
    with pytest.raises(ClusterError, match="rljobs is not listed yet") as caught:
        await early.self_check()
    assert type(caught.value) is ClusterError, "so that it is tried again"
    await early.close()
    whole = Answering(names.TRAINING_SESSION_PLURAL, names.RL_JOB_PLURAL)
    await whole.self_check()
    await whole.close()


class Conflicting(Kube):
    """An API server that answers 409 to each DELETE, and has an object of this UID, or none."""

    def __init__(self, uid: str | None) -> None:
        super().__init__(client.Configuration(), "everloop-system", Scope())
        self.uid = uid

    async def _call(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        if method == "DELETE":
            raise Conflict(f"DELETE {path}: 409")
        if self.uid is None:
            raise Absent(f"GET {path}: 404")
        return {"metadata": {"uid": self.uid}}


@pytest.mark.parametrize(
    "delete",
    [
        lambda kube: kube.delete_pod("team", "tuned-a1-0", uid="first", force=True),
        lambda kube: kube.delete_session("team", "tuned", uid="first"),
    ],
    ids=["pod", "session"],
)
async def test_a_conflict_is_no_deletion(delete: Callable[[Kube], Awaitable[None]]) -> None:
    """It is one for the pass to repeat while the object is there, and none where it has gone or is another one."""
    for uid in (None, "second"):
        other = Conflicting(uid)
        await delete(other)
        await other.close()
    same = Conflicting("first")
    with pytest.raises(Conflict):
        await delete(same)
    await same.close()
