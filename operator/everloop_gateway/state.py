"""What the gateway knows of the cluster, as its watches tell: sessions, API keys, catalogue. All of it can be lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import structlog

from everloop_gateway.catalogue import CatalogueEntry, InvalidCatalogue, catalogue_entries
from everloop_gateway.keys import InvalidKeySecret, KeyRecord, record_from_secret
from everloop_gateway.routing import SessionView, session_view
from everloop_operator.api import names

log = structlog.get_logger(__name__)

SessionKey = tuple[str, str]


class Sessions:
    """TrainingSessions by namespace and name, with events that wake whoever waits for a change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._views: dict[SessionKey, SessionView] = {}
        self._changes: dict[SessionKey | None, asyncio.Event] = {}
        self._missing_since: dict[SessionKey, float] = {}
        self._failing_since: dict[SessionKey, float] = {}

    def get(self, key: SessionKey) -> SessionView | None:
        """The session, if it is there."""
        return self._views.get(key)

    def in_namespace(self, namespace: str) -> list[SessionView]:
        """All sessions of a namespace."""
        return [view for view in self._views.values() if view.namespace == namespace]

    def change(self, key: SessionKey | None) -> asyncio.Event:
        """An event that the next change of this session (None: of any session) sets."""
        return self._changes.setdefault(key, asyncio.Event())

    def missing_seconds(self, key: SessionKey) -> float:
        """For how long a session is known not to be there, from the first time that somebody asked for it."""
        return self._clock() - self._missing_since.setdefault(key, self._clock())

    def outage_seconds(self, key: SessionKey) -> float:
        """For how long calls to a session's pod have failed without one success in between."""
        since = self._failing_since.get(key)
        return 0.0 if since is None else self._clock() - since

    def call_failed(self, key: SessionKey) -> None:
        """A call had no pod to go to, or got no answer."""
        self._failing_since.setdefault(key, self._clock())

    def call_answered(self, key: SessionKey) -> None:
        """A call was answered."""
        self._failing_since.pop(key, None)

    def put(self, view: SessionView) -> None:
        """Store a session and wake those who wait for its change."""
        key = (view.namespace, view.name)
        if self._views.get(key) != view:
            self._views[key] = view
            self._missing_since.pop(key, None)
            self._notify(key)

    def drop(self, key: SessionKey) -> None:
        """Forget a session and wake those who wait for its change."""
        if self._views.pop(key, None) is not None:
            self._failing_since.pop(key, None)
            self._missing_since[key] = self._clock()
            self._notify(key)

    def known(self) -> list[SessionKey]:
        """Namespace and name of every session."""
        return list(self._views)

    def _notify(self, key: SessionKey) -> None:
        for who in (key, None):
            event = self._changes.pop(who, None)
            if event is not None:
                event.set()


class SessionSink:
    """Feeds the sessions of one namespace, or of all (None)."""

    def __init__(self, sessions: Sessions, namespace: str | None) -> None:
        self._sessions = sessions
        self._namespace = namespace

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """These are all there are."""
        views = [session_view(resource) for resource in objects]
        present = {(view.namespace, view.name) for view in views}
        for key in self._sessions.known():
            if key not in present and self._namespace in (None, key[0]):
                self._sessions.drop(key)
        for view in views:
            self._sessions.put(view)

    def upsert(self, resource: dict[str, Any]) -> None:
        """This one is new or changed."""
        self._sessions.put(session_view(resource))

    def remove(self, resource: dict[str, Any]) -> None:
        """This one is gone."""
        self._sessions.drop((resource["metadata"]["namespace"], resource["metadata"]["name"]))


class Keys:
    """API keys by id. It is its own sink."""

    def __init__(self) -> None:
        self._records: dict[str, KeyRecord] = {}

    def get(self, key_id: str) -> KeyRecord | None:
        """The record of a key id, if there is one."""
        return self._records.get(key_id)

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """These are all there are."""
        self._records = {}
        for secret in objects:
            self.upsert(secret)

    def upsert(self, resource: dict[str, Any]) -> None:
        """This one is new or changed. One that cannot be read opens no door, and closes the one it opened."""
        try:
            record = record_from_secret(resource)
        except InvalidKeySecret as error:
            log.error("API key ignored", error=str(error))
            self.remove(resource)
        else:
            self._records[record.key_id] = record

    def remove(self, resource: dict[str, Any]) -> None:
        """This one is gone."""
        self._records.pop(resource["metadata"]["name"].removeprefix("key-"), None)


class Catalogue:
    """The catalogue's entries. It is its own sink; an unreadable one leaves the last good one in place."""

    def __init__(self) -> None:
        self.entries: tuple[CatalogueEntry, ...] = ()

    def tokenizer_id(self, base_model: str) -> str | None:
        """The tokenizer that the catalogue names for a base model."""
        return next((entry.tokenizer_id for entry in self.entries if entry.name == base_model), None)

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """These are all there are: one, or none."""
        if not objects:
            self.entries = ()
        for resource in objects:
            self.upsert(resource)

    def upsert(self, resource: dict[str, Any]) -> None:
        """This one is new or changed."""
        try:
            text = (resource.get("data") or {}).get(names.CATALOGUE_FIELD, "[]")
            self.entries = catalogue_entries(json.loads(text))
        except (ValueError, InvalidCatalogue) as error:
            log.error("catalogue ignored", config_map=names.CATALOGUE_CONFIG_MAP, error=str(error))

    def remove(self, resource: dict[str, Any]) -> None:
        """This one is gone."""
        self.entries = ()
