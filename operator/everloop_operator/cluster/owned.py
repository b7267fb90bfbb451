"""Children that are made and never taken over: an object of somebody else's may have the name of one.

Of some the operator may not read what there is. So the API server compares: a JSON patch that begins with a test of the
owner changes, and shows, only what this owner has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everloop_operator.loop.ports import Body, Forbidden

JSON_PATCH = "application/json-patch+json"
WRITTEN: Mapping[str, tuple[str, ...]] = {"Secret": ("data",), "PodDisruptionBudget": ("spec",)}
"""Kinds that may not be read, and the fields that are written again where there is one of ours."""


def is_guarded(body: Body) -> bool:
    """Whether this is a child of a kind that may not be read."""
    return body["kind"] in WRITTEN and bool(body["metadata"].get("ownerReferences"))


def owner_of(body: Body) -> str:
    """UID of the first owner; "" where there is none."""
    owners: Sequence[Body] = body["metadata"].get("ownerReferences") or ({},)
    return str(owners[0].get("uid", ""))


def only_of(owner: str) -> Body:
    """The first operation of a JSON patch (RFC 6902): it fails whole for an object with another owner, or none."""
    return {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": owner}


def changes(body: Body) -> list[Body]:
    """The JSON patch that makes the child of this name and owner what it should be."""
    fields = WRITTEN[body["kind"]]
    return [only_of(owner_of(body)), *({"op": "add", "path": f"/{field}", "value": body[field]} for field in fields)]


def taken(body: Body) -> Forbidden:
    """The name of this child is taken. It may be free soon: what a predecessor of this name had is being collected."""
    return Forbidden(
        f'{body["kind"]} "{body["metadata"]["name"]}" exists already, and is not ours: it is left as it is'
    )
