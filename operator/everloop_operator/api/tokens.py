"""Tokens and session ids, all derived from the master key by HMAC-SHA256.

Nothing is stored: any gateway replica and the operator derive the same values from the
master key (Secret ``everloop-master`` of the release namespace), so a restart loses none.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

MASTER_KEY_BYTES = 32
SESSION_ID_PATTERN = re.compile(r"s-([0-9a-f]{16})-([0-9a-f]{16})")


def master_key(text: str) -> bytes:
    """Decode the content of the Secret: 32 bytes as hex. Raises ValueError, which never shows the content."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError("Secret everloop-master: key is not hexadecimal") from None
    if len(key) != MASTER_KEY_BYTES:
        raise ValueError(f"Secret everloop-master: key has {len(key)} bytes, expected {MASTER_KEY_BYTES}")
    return key


def session_token(master: bytes, uid: str, attempt: int) -> str:
    """The bearer token of one attempt of the TrainingSession with this UID: 64 hex digits."""
    return _hmac(master, "session-token", uid, str(attempt))


def progress_token(master: bytes, uid: str, attempt: int) -> str:
    """The bearer token of the driver pod of one attempt of the RLJob with this UID: 64 hex digits."""
    return _hmac(master, "progress-token", uid, str(attempt))


def metrics_token(master: bytes) -> str:
    """The bearer token of the metrics ports of operator and gateway: 64 hex digits."""
    return _hmac(master, "metrics-token")


def job_key_id(master: bytes, uid: str) -> str:
    """The id of the API key of the RLJob with this UID.

    The same in all attempts, so that each owns what its predecessors have made.
    """
    return _hmac(master, "job-key-id", uid)[:12]


def job_key(master: bytes, uid: str, attempt: int) -> str:
    """The API key of one attempt of the RLJob with this UID; no other attempt's opens the gateway meanwhile."""
    secret = base64.urlsafe_b64encode(bytes.fromhex(_hmac(master, "job-key", uid, str(attempt))))
    return f"tml-{job_key_id(master, uid)}-{secret.decode().rstrip('=')}"


def session_id(master: bytes, namespace: str, key_id: str, idempotency_key: str) -> str:
    """The id of the client session that an API key opened with this idempotency key: a repeat gives the same id."""
    nonce = _hmac(master, "session", namespace, key_id, idempotency_key)[:16]
    return f"s-{nonce}-{_session_mac(master, namespace, key_id, nonce)}"


def verify_session_id(master: bytes, namespace: str, key_id: str, session_id: str) -> bool:
    """Was this id given out to this API key? Compares in constant time."""
    match = SESSION_ID_PATTERN.fullmatch(session_id)
    if match is None:
        return False
    nonce, mac = match.groups()
    return hmac.compare_digest(mac, _session_mac(master, namespace, key_id, nonce))


def download_mac(master: bytes, namespace: str, expires: int, path: str) -> str:
    """What opens one file of a namespace until that time, in seconds since the epoch, to whoever has it: 64 hex digits.

    It outlives attempts and gateway replicas.
    """
    return _hmac(master, "download", namespace, str(expires), path)


def verify_download(master: bytes, namespace: str, expires: int, path: str, mac: str) -> bool:
    """Was this MAC given out for this file and time? Compares in constant time."""
    return hmac.compare_digest(mac.encode(), download_mac(master, namespace, expires, path).encode())


def _session_mac(master: bytes, namespace: str, key_id: str, nonce: str) -> str:
    return _hmac(master, "mac", namespace, key_id, nonce)[:16]


def _hmac(master: bytes, *parts: str) -> str:
    # Only the last part may hold a "|" (namespaces, key ids and UIDs cannot), so the joint text is unambiguous.
    return hmac.new(master, "|".join(parts).encode(), hashlib.sha256).hexdigest()
