"""The API server's audit log: who has asked for what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

WRITES = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True)
class Entry:
    """A call that was answered."""

    user: str
    verb: str
    group: str
    resource: str
    """With its subresource: `pods/binding`."""
    namespace: str
    name: str
    code: int
    received: datetime

    @property
    def writes(self) -> bool:
        return self.verb in WRITES

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name}: {self.code}"


class AuditLog:
    """Reads on from where it was read last."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def skip(self) -> None:
        self._offset = self._path.stat().st_size

    def read(self, *users: str) -> list[Entry]:
        """The calls of these users that were answered since the last call; a watch is one call when it ends too."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = (_entry(json.loads(line)) for line in whole.splitlines() if any(u.encode() in line for u in users))
        return [entry for entry in entries if entry.user in users]


def _entry(line: dict[str, object]) -> Entry:
    about, user, status = line.get("objectRef") or {}, line["user"], line.get("responseStatus") or {}
    assert isinstance(about, dict)
    assert isinstance(user, dict)
    assert isinstance(status, dict)
    sub = about.get("subresource", "")
    return Entry(
        user=str(user["username"]),
        verb=str(line["verb"]),
        group=about.get("apiGroup", ""),
        resource=about.get("resource", "") + (f"/{sub}" if sub else ""),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=int(status.get("code", 0)),
        received=datetime.fromisoformat(str(line["requestReceivedTimestamp"])),
    )
