"""Saves that are acknowledged while no session pod can take them: written down at the API server, delivered later.

The SDK repeats a save for 5 minutes only, and after that ends at the first connection that breaks; a future that it
was promised it polls without end. So a save that finds no pod is kept as an immutable ConfigMap of the release
namespace, one for each request id, and acknowledged. Every replica delivers what is kept there, and then deletes it:
the session pod knows a repeat by its number.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import structlog

from everloop_gateway.bindings import Bindings
from everloop_gateway.holding import INTENT_AFTER_SECONDS, Kind
from everloop_gateway.ids import MalformedId, parse_request_id
from everloop_gateway.kube import ApiRefused, Kube
from everloop_gateway.routing import Gone
from everloop_gateway.upstream import Answer, Call, Progress, Upstream, until_available
from everloop_gateway.watch import Follower
from everloop_gateway.wire import JSON
from everloop_operator.api import names

# The API server takes 1 MiB as an object; a save is a few hundred bytes, and what its user adds to it.
LARGEST_BODY_BYTES = 256 * 1024
# Of one tenant at a time: the API server's storage is everybody's. One client has one save under way per model.
MOST_OF_A_NAMESPACE = 1000
REFUSED_PAUSE_SECONDS = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Intent:
    """A numbered call that the client was promised a result of."""

    request_id: str
    namespace: str
    """The tenant's."""
    path: str
    body: bytes

    @property
    def name(self) -> str:
        """Of its ConfigMap."""
        return intent_name(self.request_id)


class Intents:
    """Keeps intents, and delivers those that are kept. It is its own sink for the watch of their ConfigMaps."""

    def __init__(self, kube: Kube, release_namespace: str, bindings: Bindings, upstream: Upstream) -> None:
        self.path = f"/api/v1/namespaces/{release_namespace}/configmaps"
        self._kube = kube
        self._bindings = bindings
        self._upstream = upstream
        self._kept: dict[str, Intent] = {}
        self._changed = asyncio.Event()

    async def answer(self, intent: Intent, delivering: Awaitable[Answer], progress: Progress) -> Answer:
        """The pod's answer to a call or, where that takes too long, the acknowledgement that the call is kept."""
        sending = asyncio.ensure_future(delivering)
        keeping: asyncio.Future[Answer] | None = None
        try:
            await asyncio.wait([sending], timeout=INTENT_AFTER_SECONDS)
            if not sending.done() and self._has_room_for(intent):
                keeping = asyncio.ensure_future(self._keep(intent, progress))
                await asyncio.wait([sending, keeping], return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    return keeping.result()
            return await sending
        finally:
            for task in (sending, keeping):
                if task is not None:
                    task.cancel()

    async def settle(self, request_id: str, progress: Progress) -> None:
        """See that the session pod has what was kept under this request id, whichever replica kept it."""
        name = intent_name(request_id)
        kept = await until_available(lambda: self._kube.get(f"{self.path}/{name}"), progress)
        intent = None if kept is None else from_config_map(kept)
        if intent is not None:
            await self._deliver(intent, progress)

    async def run(self, ready: asyncio.Event) -> None:
        """Follow what is kept, and deliver it, for ever; from when sessions and master key are known."""
        await ready.wait()
        selectors = {"labelSelector": f"{names.LABEL_TYPE}={names.TYPE_INTENT}"}
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Follower(self._kube, self.path, self, selectors).run())
            while True:
                for uid in running.keys() - self._kept.keys():
                    running.pop(uid).cancel()
                for uid in self._kept.keys() - running.keys():
                    running[uid] = tasks.create_task(self._deliver_in_the_end(self._kept[uid]))
                await self._changed.wait()
                self._changed.clear()

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """These are all there are."""
        self._kept.clear()
        self._changed.set()
        for resource in objects:
            self.upsert(resource)

    def upsert(self, resource: dict[str, Any]) -> None:
        """This one is new."""
        intent = from_config_map(resource)
        if intent is None:
            log.error("intent ignored: not one of ours", config_map=resource["metadata"]["name"])
        else:
            self._kept[resource["metadata"]["uid"]] = intent
            self._changed.set()

    def remove(self, resource: dict[str, Any]) -> None:
        """This one is gone: delivered, by this replica or another."""
        self._kept.pop(resource["metadata"]["uid"], None)
        self._changed.set()

    def _has_room_for(self, intent: Intent) -> bool:
        of_namespace = sum(kept.namespace == intent.namespace for kept in self._kept.values())
        return len(intent.body) <= LARGEST_BODY_BYTES and of_namespace < MOST_OF_A_NAMESPACE

    async def _keep(self, intent: Intent, progress: Progress) -> Answer:
        body = to_config_map(intent)
        made = await until_available(lambda: self._kube.create(self.path, body, names.GATEWAY_FIELD_MANAGER), progress)
        log.info("save kept until its session serves", request_id=intent.request_id, new=made is not None)
        return Answer(200, JSON, b'{"request_id": "%s"}' % intent.request_id.encode())

    async def _deliver_in_the_end(self, intent: Intent) -> None:
        while True:
            try:
                return await self._deliver(intent, Progress())
            except ApiRefused as error:
                log.error(
                    "intent not delivered", request_id=intent.request_id, status=error.status, error=error.message
                )
            await asyncio.sleep(REFUSED_PAUSE_SECONDS)

    async def _deliver(self, intent: Intent, progress: Progress) -> None:
        stream = parse_request_id(intent.request_id)
        binding = await until_available(lambda: self._bindings.get(intent.namespace, stream), progress)
        if binding is not None:  # else its storage was deleted, and the model with it
            call = Call(Kind.SAVE, intent.path, intent.body, JSON, JSON)
            answer = await self._upstream.deliver(binding, call, progress)
            status = 410 if isinstance(answer, Gone) else answer.status
            log.info("kept save delivered", request_id=intent.request_id, status=status)
        await until_available(lambda: self._kube.delete(f"{self.path}/{intent.name}"), progress)


def intent_name(request_id: str) -> str:
    """Name of the ConfigMap that keeps the call with this request id."""
    return f"evi-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}"


def to_config_map(intent: Intent) -> dict[str, Any]:
    """The ConfigMap that keeps an intent."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": intent.name,
            "labels": {names.LABEL_TYPE: names.TYPE_INTENT, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "immutable": True,
        "data": {"requestId": intent.request_id, "namespace": intent.namespace, "path": intent.path},
        "binaryData": {"body": base64.b64encode(intent.body).decode()},
    }


def from_config_map(resource: dict[str, Any]) -> Intent | None:
    """The intent in a ConfigMap; None where somebody else has made one of that name."""
    data, binary = resource.get("data") or {}, resource.get("binaryData") or {}
    if not (data.keys() >= {"requestId", "namespace", "path"} and "body" in binary):
        return None
    try:
        parse_request_id(data["requestId"])
        body = base64.b64decode(binary["body"], validate=True)
    except (MalformedId, binascii.Error):
        return None
    intent = Intent(data["requestId"], data["namespace"], data["path"], body)
    return intent if intent.name == resource["metadata"]["name"] else None
