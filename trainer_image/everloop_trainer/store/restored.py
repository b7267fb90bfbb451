"""What the copies of a lost storage say of its models: written before a restored storage is opened for the first time.

Every incarnation reads it and journals what it does not find in the history, so it counts once, whoever dies between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.rollback import RolledBack
from everloop_trainer.store import layout
from everloop_trainer.store.files import Files


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class _RestoredFile:
    format: Literal[1]
    models: tuple[RolledBack, ...]


_RESTORED = TypeAdapter(_RestoredFile)


def write_restored(files: Files, models: tuple[RolledBack, ...]) -> None:
    """Say it once: where it was said before, that stays. Raises OSError."""
    try:
        files.create(layout.RESTORED, _RESTORED.dump_json(_RestoredFile(1, models), indent=2))
    except FileExistsError:
        return


def read_restored(files: Files) -> tuple[RolledBack, ...]:
    """The models of a storage that was restored; none for any other. Raises JournalDamaged, OSError."""
    try:
        with files.open_read(layout.RESTORED) as file:
            content = file.read()
    except FileNotFoundError:
        return ()
    try:
        return _RESTORED.validate_json(content, strict=True).models
    except ValidationError as error:
        raise JournalDamaged(f"{layout.RESTORED}: {error.errors()[0]['msg']}") from error
