"""The gateway's knowledge of the cluster, kept up to date by its watches, and the master key."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from typing import Any

import structlog

from everloop_gateway.bindings import Bindings
from everloop_gateway.keys import (
    InvalidKeySecret,
    KeyRecord,
    Principal,
    Unauthorized,
    authenticate,
    fits,
    key_id_of,
    record_from_secret,
    secret_name,
)
from everloop_gateway.kube import ApiRefused, ApiUnavailable, Kube
from everloop_gateway.routing import SessionView, session_view
from everloop_gateway.settings import Settings
from everloop_gateway.state import Catalogue, Keys, Sessions, SessionSink
from everloop_gateway.unseen_keys import UnseenKeys
from everloop_gateway.watch import Follower
from everloop_operator.api import names, tokens

MASTER_PAUSE_SECONDS = 1.0
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

log = structlog.get_logger(__name__)


class Cluster:
    """Sessions, keys, catalogue, bindings and master key. Ready once all of them were read."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self.sessions = Sessions()
        self.catalogue = Catalogue()
        self.bindings = Bindings(kube)
        self.ready = asyncio.Event()
        self._kube = kube
        self._keys = Keys()
        self._unseen = UnseenKeys(self._read_key)
        self._master: bytes | None = None
        self._namespaces = settings.namespaces
        self._release = f"/api/v1/namespaces/{settings.release_namespace}"
        self._followers = [
            Follower(kube, _sessions_path(namespace), SessionSink(self.sessions, namespace))
            for namespace in (settings.namespaces or (None,))
        ]
        self._followers += [
            Follower(
                kube,
                f"{self._release}/secrets",
                self._keys,
                {"labelSelector": f"{names.LABEL_TYPE}={names.TYPE_API_KEY}"},
            ),
            Follower(
                kube,
                f"{self._release}/configmaps",
                self.catalogue,
                {"fieldSelector": f"metadata.name={names.CATALOGUE_CONFIG_MAP}"},
            ),
        ]

    async def run(self) -> None:
        """Follow the cluster for ever."""
        async with asyncio.TaskGroup() as tasks:
            for follower in self._followers:
                tasks.create_task(follower.run())
            self._master = await self._read_master()
            for follower in self._followers:
                await follower.synced.wait()
            self.ready.set()
            log.info("ready")

    def api_outage_seconds(self) -> float:
        """For how long this replica has been cut off from the Kubernetes API."""
        return self._kube.outage_seconds()

    def master(self) -> bytes:
        """The master key. Not before ready."""
        assert self._master is not None
        return self._master

    async def authenticate(self, key: str) -> Principal:
        """Whose key is it?

        Raises:
            Unauthorized: nobody's, as far as the API server knows now.
            TooManyQuestions, ApiUnavailable, ApiRefused: that can't be told now.
        """
        if not key:
            raise Unauthorized("X-API-Key: required")
        key_id = key_id_of(key)
        record = self._keys.get(key_id)
        if not fits(key, record):
            # The watch may be behind: a key that was made, or took another's place, a moment ago.
            record = await self._unseen.find(key, key_id)
        principal = authenticate(key, record, datetime.now(UTC))
        if self._namespaces and principal.namespace not in self._namespaces:
            where = f"its namespace {principal.namespace!r}"
            raise Unauthorized(f"X-API-Key: {where} is none of those that this installation serves")
        return principal

    def owns(self, principal: Principal, session_id: str) -> bool:
        """Was this client session opened with this key?"""
        return tokens.verify_session_id(self.master(), principal.namespace, principal.key_id, session_id)

    def made_by_job(self, namespace: str, session_id: str, job: str) -> bool:
        """Was this client session opened, in this namespace, with the key of the RLJob with this UID?

        The id proves it: who writes another UID into a binding opens nothing by that.
        """
        master = self.master()
        return tokens.verify_session_id(master, namespace, tokens.job_key_id(master, job), session_id)

    async def list_sessions(self, namespace: str) -> list[SessionView]:
        """The TrainingSessions of a namespace as they are now. Raises ApiUnavailable, ApiRefused."""
        objects, _ = await self._kube.list(_sessions_path(namespace), {})
        return [session_view(resource) for resource in objects]

    async def may_create_session(self, principal: Principal) -> bool:
        """May the key's subject itself create a TrainingSession in its namespace? Raises ApiUnavailable, ApiRefused."""
        attributes = {
            "namespace": principal.namespace,
            "verb": "create",
            "group": names.GROUP,
            "version": names.VERSION,
            "resource": names.TRAINING_SESSION_PLURAL,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": principal.subject, "resourceAttributes": attributes},
        }
        answer = await self._kube.create(ACCESS_REVIEWS, review, names.GATEWAY_FIELD_MANAGER)
        return answer is not None and answer["status"].get("allowed") is True

    async def create_session(self, namespace: str, manifest: dict[str, Any]) -> bool:
        """Create a TrainingSession; False if its name is taken. Raises ApiUnavailable, ApiRefused."""
        return await self._kube.create(_sessions_path(namespace), manifest, names.GATEWAY_FIELD_MANAGER) is not None

    async def wake(self, namespace: str, name: str, uid: str) -> None:
        """Tell the operator that a call needs this TrainingSession. Raises ApiUnavailable, ApiRefused."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = {"metadata": {"uid": uid, "annotations": {names.ANNOTATION_WAKE: time}}}
        await self._kube.merge(f"{_sessions_path(namespace)}/{name}", body, names.GATEWAY_FIELD_MANAGER)

    async def _read_key(self, key_id: str) -> KeyRecord | None:
        # A list of one, because this process may list Secrets but read only the master key by name.
        selectors = {
            "labelSelector": f"{names.LABEL_TYPE}={names.TYPE_API_KEY}",
            "fieldSelector": f"metadata.name={secret_name(key_id)}",
        }
        found, _ = await self._kube.list(f"{self._release}/secrets", selectors)
        try:
            return record_from_secret(found[0]) if found else None
        except InvalidKeySecret:
            return None  # the watch says so in the log

    async def _read_master(self) -> bytes:
        """Read the master key, which the operator creates; it never changes."""
        path = f"{self._release}/secrets/{names.MASTER_KEY_SECRET}"
        while True:
            try:
                secret = await self._kube.get(path)
            except (ApiUnavailable, ApiRefused) as error:
                log.warning("master key cannot be read yet", path=path, error=str(error))
            else:
                if secret is not None:
                    return tokens.master_key(_secret_text(secret, names.MASTER_KEY_FIELD))
                log.warning("there is no master key yet; the operator makes it", path=path)
            await asyncio.sleep(MASTER_PAUSE_SECONDS)


def _sessions_path(namespace: str | None) -> str:
    scope = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"/apis/{names.API_VERSION}{scope}/{names.TRAINING_SESSION_PLURAL}"


def _secret_text(secret: dict[str, Any], field: str) -> str:
    return base64.b64decode((secret.get("data") or {}).get(field, "")).decode("ascii", "replace")
