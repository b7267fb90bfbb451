"""Credentials from the files of a mounted Secret, read anew for each request: a rotated one takes effect at once."""

from __future__ import annotations

from pathlib import Path

from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import NoCredentialsError

ACCESS_KEY, SECRET_KEY, SESSION_TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"


class MountedCredentials(Credentials):  # type: ignore[misc] # botocore has no annotations
    """What botocore asks when it signs a request.

    Args:
        directory: holds one file per variable of `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, for credentials
            that expire, `AWS_SESSION_TOKEN`.

    Raises:
        NoCredentialsError: by each use, as long as one of the first two is missing or empty.
    """

    METHOD = "mounted-secret"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        super().__init__("", "", None, self.METHOD)

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """The credentials as they are now."""
        access, secret = self._read(ACCESS_KEY), self._read(SECRET_KEY)
        if not access or not secret:
            raise NoCredentialsError
        return ReadOnlyCredentials(access, secret, self._read(SESSION_TOKEN) or None, None)

    def _read(self, name: str) -> str:
        try:
            return (self._directory / name).read_text().strip()
        except FileNotFoundError:
            return ""


class MountedProvider:
    """In the place of botocore's own chain."""

    METHOD = MountedCredentials.METHOD
    CANONICAL_NAME = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> MountedCredentials:
        """As botocore's providers."""
        return MountedCredentials(self._directory)
