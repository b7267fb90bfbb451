"""What the API server has refused to make, object by object, for as long as that holds."""

from __future__ import annotations

from everloop_operator.core.refusals import Refusal, refused

from .ports import Forbidden, Key, Now, Refused


class Refusals:
    """The last refusal of each session or job."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._last: dict[Key, Refusal] = {}

    def get(self, key: Key) -> Refusal | None:
        """Why the last pod of this object was refused, while that still holds."""
        return self._last.get(key)

    def add(self, key: Key, error: Refused, generation: int) -> Refusal:
        """It was refused just now, for this generation of the object."""
        forbidden = isinstance(error, Forbidden)
        last = refused(self._last.get(key), str(error), self._now(), generation, forbidden=forbidden)
        self._last[key] = last
        return last

    def clear(self, key: Key) -> None:
        """It was made, or the object is gone."""
        self._last.pop(key, None)
