"""The one way in which the work of a call ends without an answer of a session."""

from __future__ import annotations


class Refusal(Exception):
    """The call cannot be done and will not be by repeating it."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
