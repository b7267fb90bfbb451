"""API keys: their text, the Secret that stands for one, and the check of one against the other. Pure functions.

A key is ``tml-<key id: 12 hex>-<secret: 43 characters of URL-safe base64>``; the cluster holds its SHA-256 only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from everloop_operator.api import names

_KEY = re.compile(r"tml-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class InvalidKeySecret(ValueError):
    """A Secret labelled as an API key that is not one; the message names the field and shows no value."""


class Unauthorized(Exception):
    """The caller's key is missing, unknown, revoked or expired."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What the cluster knows of one API key."""

    key_id: str
    sha256: str
    namespace: str
    subject: str
    expires: datetime | None
    session: str = ""
    """The one TrainingSession that new models may go to; empty for any."""
    checkpoint: str = ""
    """A checkpoint of somebody else's that may be read."""
    job: str = ""
    """UID of the RLJob whose key it is; empty for a person's."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request comes from: the tenant (namespace), the key within it, and the name behind the key."""

    namespace: str
    key_id: str
    subject: str
    session: str = ""
    checkpoint: str = ""
    job: str = ""


def secret_name(key_id: str) -> str:
    """Name of the Secret of an API key."""
    return f"key-{key_id}"


def digest(key: str) -> str:
    """What is stored of a key: SHA-256 of its text, as hex. A key has 256 random bits, so it needs no salt."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_id_of(key: str) -> str:
    """The public part of a key. Raises Unauthorized."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise Unauthorized("X-API-Key: not an API key of this server")
    return match[1]


def record_from_secret(secret: dict[str, Any]) -> KeyRecord:
    """Read a Secret object of the API. Raises InvalidKeySecret."""
    name = secret["metadata"]["name"]
    data = secret.get("data") or {}
    fields = {
        field: _decode(name, field, data.get(field, ""))
        for field in ("sha256", "namespace", "subject", "expires", "session", "checkpoint")
    }
    if not name.startswith("key-") or not re.fullmatch(r"[0-9a-f]{12}", name.removeprefix("key-")):
        raise InvalidKeySecret(f"Secret {name}: metadata.name: expected key-<12 hex digits>")
    if not _SHA256.fullmatch(fields["sha256"]):
        raise InvalidKeySecret(f"Secret {name}: sha256: expected 64 hex digits")
    if not fields["namespace"]:
        raise InvalidKeySecret(f"Secret {name}: namespace: required")
    return KeyRecord(
        key_id=name.removeprefix("key-"),
        sha256=fields["sha256"],
        namespace=fields["namespace"],
        subject=fields["subject"],
        expires=_expiry(name, fields["expires"]),
        session=fields["session"],
        checkpoint=fields["checkpoint"],
        job=(secret["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, ""),
    )


def fits(key: str, record: KeyRecord | None) -> bool:
    """Is this the key of the record? Compares in constant time."""
    # Unknown ids take the same path as wrong secrets, so that the time taken tells them apart no better.
    expected = record.sha256 if record is not None else "0" * 64
    return hmac.compare_digest(expected, digest(key))


def authenticate(key: str, record: KeyRecord | None, now: datetime) -> Principal:
    """Check a key against the record of its id. Raises Unauthorized."""
    if not fits(key, record) or record is None:
        raise Unauthorized("X-API-Key: unknown or revoked API key")
    if record.expires is not None and now >= record.expires:
        raise Unauthorized(f"X-API-Key: this API key expired at {record.expires.isoformat()}")
    return Principal(record.namespace, record.key_id, record.subject, record.session, record.checkpoint, record.job)


def mint(
    namespace: str, subject: str, release_namespace: str, expires: datetime | None, random: bytes
) -> tuple[str, dict[str, Any]]:
    """A new key and the manifest of its Secret, from 38 random bytes."""
    if len(random) != 38:
        raise ValueError("random: 38 bytes are required")
    key_id = random[:6].hex()
    key = f"tml-{key_id}-{base64.urlsafe_b64encode(random[6:]).decode().rstrip('=')}"
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(key_id),
            "namespace": release_namespace,
            "labels": {names.LABEL_TYPE: names.TYPE_API_KEY, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "type": "Opaque",
        "stringData": {
            "sha256": digest(key),
            "namespace": namespace,
            "subject": subject,
            "expires": "" if expires is None else expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
    }
    return key, manifest


def _decode(secret: str, field: str, encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidKeySecret(f"Secret {secret}: {field}: not base64 of text") from None


def _expiry(secret: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidKeySecret(f"Secret {secret}: expires: not an RFC 3339 time") from None
    if moment.tzinfo is None:
        raise InvalidKeySecret(f"Secret {secret}: expires: a time zone is required")
    return moment
