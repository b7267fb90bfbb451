"""Encrypting files with age (age-encryption.org/v1), so that only the holders of certain keys can read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pyrage

from everloop_trainer.durable import write_all

SUFFIX = ".age"
MOST_RECIPIENTS = 10
FILE_MODE = 0o600


class BadRecipient(ValueError):
    """A text is no public key that files can be encrypted for."""


def recipient(text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    """The public key in a text: age's own (`age1...`), or one of OpenSSH (`ssh-ed25519 ...`, `ssh-rsa ...`).

    Raises BadRecipient.
    """
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except (pyrage.RecipientError, UnicodeEncodeError) as error:
        raise BadRecipient(str(error)) from None


def seal(source: Path, target: Path, recipients: Sequence[str]) -> tuple[str, int]:
    """Encrypt a file into a new one, whose content is on disk then; returns its SHA-256 (hex) and size in bytes.

    Neither is ever in memory as a whole. Raises BadRecipient, FileExistsError if there is such a file, and OSError if
    storage fails; no partial file is left behind.
    """
    keys = [recipient(text) for text in recipients]
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            sink = _Sink(descriptor)
            with source.open("rb") as file:
                sink.take(_Reader(file.fileno()), keys)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        target.unlink()
        raise
    return sink.digest.hexdigest(), sink.size


class _Reader:
    """A file as pyrage reads it; keeps what went wrong, of which pyrage would tell the words alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def read(self, size: int) -> bytes:
        try:
            return os.read(self._descriptor, size)
        except OSError as error:
            self.failure = error
            raise


class _Sink:
    """Takes the parts of an encrypted file in their order; keeps what went wrong, as `_Reader`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failure: OSError | None = None
        self.digest = hashlib.sha256()
        self.size = 0

    def take(self, reader: _Reader, keys: Sequence[pyrage.x25519.Recipient | pyrage.ssh.Recipient]) -> None:
        try:
            pyrage.encrypt_io(reader, self, keys)
        except pyrage.EncryptError as error:
            failure = self.failure or reader.failure
            raise OSError(str(error)) if failure is None else failure from None

    def write(self, data: bytes) -> int:
        try:
            size = write_all(self._descriptor, data)
        except OSError as error:
            self.failure = error
            raise
        self.digest.update(data)
        self.size += size
        return size

    def flush(self) -> None:
        """Nothing waits here: `seal` has it flushed to the disk at the end."""
