"""Projects, of which each namespace is one, by its name: what the SDK puts into a project goes there, or nowhere."""

from __future__ import annotations

from everloop_gateway.ids import shorten
from everloop_gateway.refusal import Refusal


def refuse_other_projects(project: object, namespace: str, field: str) -> None:
    """For a key of that namespace; None names none. Raises Refusal naming the field."""
    if project is not None and project != namespace:
        known = f"the only project here is {namespace!r}, the namespace of this API key"
        raise Refusal(400, f"{field}: {shorten(str(project))!r} is not known; {known}")
