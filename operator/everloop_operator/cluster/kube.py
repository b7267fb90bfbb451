"""`loop.ports.Cluster` on kubernetes.aio: the only caller of the API server besides kopf's watches.

Bodies are plain dicts (building typed objects would block the loop for seconds with many pods), every request has one
number as its timeout (the client hands aiohttp a (connect, read) pair that it refuses), and at most 16 run at a time.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import structlog
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from everloop_operator.api import crd, names, tokens
from everloop_operator.api.served import lacking
from everloop_operator.core.events import Event
from everloop_operator.core.projections import format_time
from everloop_operator.loop.metrics import API_REQUESTS
from everloop_operator.loop.ports import Absent, Body, ClusterError, Conflict, Forbidden, Listed, Refused
from everloop_operator.loop.scope import Scope

from . import owned
from .retry_after import wait_seconds

log = structlog.get_logger()

REQUEST_SECONDS = 30.0
CONCURRENT_REQUESTS = 16
TRIES = 5
"""How often a request is sent that the API server is too busy for (429)."""
PAGE = 250
"""How many objects of a list are held parsed at a time: memory is at its greatest while lists are read."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
OURS = f"/apis/{names.API_VERSION}"
PLURALS = {names.TRAINING_SESSION_KIND: names.TRAINING_SESSION_PLURAL, names.RL_JOB_KIND: names.RL_JOB_PLURAL}
POD_SELECTOR = (
    f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},"
    f"{names.LABEL_COMPONENT} in ({names.COMPONENT_TRAINER},{names.COMPONENT_DRIVER})"
)
KEY_SELECTOR = f"{names.LABEL_TYPE}={names.TYPE_API_KEY},{names.LABEL_JOB_UID}"
METADATA_OF_ALL = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
METADATA_OF_ONE = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"

_ERRORS: dict[int, type[ClusterError]] = {400: Refused, 403: Forbidden, 404: Absent, 409: Conflict, 422: Refused}


async def load_configuration() -> Any:
    """The client configuration of this process: `KUBECONFIG` if it is set, else the pod's service account."""
    configuration = client.Configuration()
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig:
        await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    return configuration


class Kube:
    """An API server, and the namespace of the installation."""

    def __init__(self, configuration: Any, release_namespace: str, scope: Scope) -> None:
        self._release = release_namespace
        self._scope = scope
        self._client = client.ApiClient(configuration)
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    # --- reading ---

    def list_sessions(self) -> AsyncIterator[Listed]:
        """All TrainingSessions, page by page."""
        return self._pages(f"{OURS}/{names.TRAINING_SESSION_PLURAL}")

    def list_jobs(self) -> AsyncIterator[Listed]:
        """All RLJobs, page by page."""
        return self._pages(f"{OURS}/{names.RL_JOB_PLURAL}")

    async def list_job_keys(self) -> Listed:
        """Metadata of the API keys of all jobs; what is in them is not asked for."""
        return await self._list(_path(self._release, "secrets"), METADATA_OF_ALL, labelSelector=KEY_SELECTOR)

    def list_pods(self) -> AsyncIterator[Listed]:
        """All session pods and driver pods, page by page."""
        return self._pages("/api/v1/pods", labelSelector=POD_SELECTOR)

    def list_nodes(self) -> AsyncIterator[Listed]:
        """All nodes, page by page; none where the scope has none."""
        return self._pages("/api/v1/nodes")

    async def latest(self, body: Body) -> Body:
        """A TrainingSession or an RLJob as it is now. Raises Absent."""
        return await self._call("GET", _path_of(body))

    async def pod(self, namespace: str, name: str) -> Body:
        """A pod. Raises Absent."""
        return await self._call("GET", _path(namespace, "pods", name))

    async def node(self, name: str) -> Body:
        """A node. Raises Absent."""
        return await self._call("GET", f"/api/v1/nodes/{quote(name)}")

    async def claim(self, namespace: str, name: str) -> Body:
        """A PersistentVolumeClaim. Raises Absent."""
        return await self._call("GET", _path(namespace, "persistentvolumeclaims", name))

    async def volume(self, name: str) -> Body:
        """A PersistentVolume. Raises Absent, Refused."""
        return await self._call("GET", f"/api/v1/persistentvolumes/{quote(name)}")

    async def events_of(self, namespace: str, kind: str, name: str) -> Listed:
        """The events of one object."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        return await self._list(_path(namespace, "events"), fieldSelector=selector)

    async def _list(self, path: str, accept: str = "application/json", **query: str) -> Listed:
        """What the scope shows of a short list. The oldest version is told: what is newer is not said to be gone."""
        pages = [page async for page in self._pages(path, accept, **query)]
        items = tuple(item for page in pages for item in page.items)
        return Listed(items, min((page.version for page in pages), default=0))

    async def _pages(self, path: str, accept: str = "application/json", **query: str) -> AsyncIterator[Listed]:
        """What the scope shows of a list."""
        for part in self._scope.paths(path):
            parameters: dict[str, Any] = {**query, "limit": PAGE}
            while True:
                page = await self._call("GET", part, query=parameters, accept=accept)
                # Of metadata alone an empty list is null.
                yield Listed(tuple(page["items"] or ()), int(page["metadata"]["resourceVersion"]))
                token = page["metadata"].get("continue")
                if not token:
                    break
                parameters["continue"] = token

    # --- writing ---

    async def apply(self, body: Body) -> Body:
        """Makes a Pod, a Secret, a PodDisruptionBudget or a TrainingSession, or makes it what it should be.

        Raises:
            Refused: the API server will not have it.
            Forbidden: or there is an object of this name that is not its owner's.
        """
        if owned.is_guarded(body):
            return await self._make_or_change(body)
        query = {"fieldManager": names.OPERATOR_FIELD_MANAGER, "force": "true"}
        try:
            return await self._call("PATCH", _path_of(body), query=query, body=body, content_type=APPLY)
        except Refused:
            # A pod can't be made another one, and what the API server says of that misleads.
            if body["kind"] == "Pod" and await self._is_taken(body):
                raise owned.taken(body) from None
            raise

    async def _make_or_change(self, body: Body) -> Body:
        query = {"fieldManager": names.OPERATOR_FIELD_MANAGER}
        path = _path_of(body)
        try:
            return await self._call("POST", path.rpartition("/")[0], query=query, body=body)
        except Conflict:
            pass
        try:
            changes = owned.changes(body)
            return await self._call("PATCH", path, query=query, body=changes, content_type=owned.JSON_PATCH)
        except Forbidden:
            raise
        except Refused as error:
            raise owned.taken(body) from error

    async def _is_taken(self, body: Body) -> bool:
        metadata = body["metadata"]
        try:
            found = await self.pod(metadata["namespace"], metadata["name"])
        except Absent:
            return False
        return owned.owner_of(found) != owned.owner_of(body)

    async def create_claim(self, body: Body) -> None:
        """Creates a PersistentVolumeClaim; that there is one of its name already is no error. Raises Refused."""
        try:
            await self._call("POST", _path(body["metadata"]["namespace"], "persistentvolumeclaims"), body=body)
        except Conflict:
            pass

    async def delete_pod(self, namespace: str, name: str, *, uid: str, force: bool) -> None:
        """Deletes the pod of this UID; that it is gone or another one already is no error."""
        options = {"gracePeriodSeconds": 0} if force else {}
        await self._delete(_path(namespace, "pods", name), uid, options)

    async def delete_secret(self, namespace: str, name: str) -> None:
        """Deletes a secret; that there is none is no error."""
        try:
            await self._call("DELETE", _path(namespace, "secrets", name))
        except Absent:
            pass

    async def delete_owned_secret(self, namespace: str, name: str, *, owner: str) -> None:
        """Deletes a secret if this is its owner's UID; that there is none, or one of somebody else's, is no error."""
        path = _path(namespace, "secrets", name)
        try:
            test: list[Body] = [owned.only_of(owner)]
            found = await self._call("PATCH", path, body=test, content_type=owned.JSON_PATCH, accept=METADATA_OF_ONE)
            await self._call("DELETE", path, body={"preconditions": {"uid": found["metadata"]["uid"]}})
        except Absent:
            pass
        except Forbidden:
            raise
        except Refused as error:
            log.warning("a secret of somebody else's is left", namespace=namespace, name=name, problem=str(error))

    async def delete_session(self, namespace: str, name: str, *, uid: str) -> None:
        """Deletes the TrainingSession of this UID; that it is gone or another one already is no error."""
        path = f"{OURS}/namespaces/{quote(namespace)}/{names.TRAINING_SESSION_PLURAL}/{quote(name)}"
        await self._delete(path, uid, {})

    async def _delete(self, path: str, uid: str, options: Mapping[str, Any]) -> None:
        try:
            await self._call("DELETE", path, body={**options, "preconditions": {"uid": uid}})
        except Absent:
            pass
        except Conflict:
            # The same answer for an object that is another one, and for a write that came in between.
            if await self._uid(path) == uid:
                raise

    async def _uid(self, path: str) -> str | None:
        try:
            found = await self._call("GET", path, accept=METADATA_OF_ONE)
        except Absent:
            return None
        return str(found["metadata"]["uid"])

    async def set_finalizers(self, body: Body, finalizers: Sequence[str]) -> Body:
        """Replaces the finalizers; the resourceVersion of `body` makes sure that nobody wrote in between."""
        version = body["metadata"]["resourceVersion"]
        change = {"metadata": {"resourceVersion": version, "finalizers": list(finalizers)}}
        query = {"fieldManager": names.OPERATOR_FIELD_MANAGER}
        return await self._call("PATCH", _path_of(body), query=query, body=change, content_type=MERGE)

    async def write_status(self, body: Body, status: Body) -> Body:
        """Replaces the status; the resourceVersion of `body` makes sure that nobody wrote in between."""
        query = {"fieldManager": names.OPERATOR_FIELD_MANAGER}
        return await self._call("PUT", f"{_path_of(body)}/status", query=query, body={**body, "status": status})

    async def post_event(self, body: Body, event: Event, time: datetime) -> None:
        """Tells an event; its name follows from what it tells, so that telling it again changes nothing."""
        metadata = body["metadata"]
        identity = "|".join((metadata["uid"], event.reason, event.key))
        name = f"{event.order[0]:06x}{event.order[1]:x}{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        stamp = format_time(time)[:-5] + "Z"  # metav1.Time has no fractions
        document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{name}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": body["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": names.OPERATOR_FIELD_MANAGER},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._call("POST", _path(metadata["namespace"], "events"), body=document)
        except Conflict:
            pass

    # --- the master key ---

    async def master_key(self) -> bytes:
        """The master key of the installation; made at the first start, by whichever process comes first."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": names.MASTER_KEY_SECRET,
                "namespace": self._release,
                "labels": {names.LABEL_TYPE: names.TYPE_MASTER_KEY, names.LABEL_MANAGED_BY: names.MANAGED_BY},
            },
            "stringData": {names.MASTER_KEY_FIELD: secrets.token_hex(tokens.MASTER_KEY_BYTES)},
        }
        path = _path(self._release, "secrets", names.MASTER_KEY_SECRET)
        try:
            found = await self._call("GET", path)
        except Absent:
            try:
                found = await self._call("POST", _path(self._release, "secrets"), body=body)
            except Conflict:
                found = await self._call("GET", path)
        return tokens.master_key(_decode(found.get("data", {}).get(names.MASTER_KEY_FIELD, "")))

    async def publish_metrics_token(self, token: str) -> None:
        """Writes the token of the metrics ports into a Secret of the release namespace, where Prometheus finds it."""
        metadata = {
            "name": names.METRICS_SECRET,
            "namespace": self._release,
            "labels": {names.LABEL_TYPE: names.TYPE_METRICS_TOKEN, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        }
        data = {names.TOKEN_FIELD: base64.b64encode(token.encode()).decode()}
        await self.apply({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data})

    async def self_check(self) -> None:
        """Reads each watched kind once. Raises ClusterError naming what is missing: the CRD, or a right."""
        watched = (*(f"{OURS}/{plural}" for plural in PLURALS.values()), "/api/v1/pods", "/api/v1/nodes")
        for path in watched:
            for part in self._scope.paths(path):
                await self._call("GET", part, query={"limit": 1})
        # kopf watches what it finds here when it starts, and a kind that was just installed may not be listed yet.
        listed = {resource["name"] for resource in (await self._call("GET", OURS))["resources"]}
        for plural in PLURALS.values():
            if plural not in listed:
                raise ClusterError(f"GET {OURS}: {plural} is not listed yet")

    async def lacking(self) -> dict[str, list[str]]:
        """Kind -> fields of this version that the served schema does not have; nothing of a kind that has them all."""
        try:
            document = await self._call("GET", f"/openapi/v3{OURS}")
        except Absent as error:  # published a moment after the kinds are served
            raise ClusterError(str(error)) from error
        served = document["components"]["schemas"]
        found = {}
        for definition in (crd.training_session_crd(), crd.rl_job_crd()):
            kind, version = definition["spec"]["names"]["kind"], definition["spec"]["versions"][0]
            name = ".".join((*reversed(names.GROUP.split(".")), names.VERSION, kind))
            missing = lacking(version["schema"]["openAPIV3Schema"], served.get(name, {}))
            if missing:
                found[kind] = missing
        return found

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: Body | list[Body] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> dict[str, Any]:
        resource = path + (f"?{urlencode(query)}" if query else "")
        what = f"{method} {path}"
        for attempt in range(1, TRIES + 1):
            async with self._slots:
                status, pause, content = await self._send(method, resource, what, body, content_type, accept)
            if status != 429 or attempt == TRIES:
                break
            # The slot is free meanwhile: only this request is told to wait.
            await asyncio.sleep(pause)
        if status >= 300:
            raise _ERRORS.get(status, ClusterError)(f"{what}: {status}: {_message(content)}")
        document: dict[str, Any] = json.loads(content)
        return document

    async def _send(
        self,
        method: str,
        resource: str,
        what: str,
        body: Body | list[Body] | None,
        content_type: str,
        accept: str,
    ) -> tuple[int, float, bytes]:
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            # Signs the request with the token as it is now: service account tokens are rotated.
            method, url, headers, body, _ = await self._client.param_serialize(
                method, resource, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = await self._client.call_api(
                method, url, header_params=headers, body=body, _request_timeout=REQUEST_SECONDS
            )
            content: bytes = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            API_REQUESTS.labels(method, "error").inc()
            raise ClusterError(f"{what}: {type(error).__name__}") from error
        API_REQUESTS.labels(method, str(answer.status)).inc()
        return answer.status, wait_seconds(answer.headers), content


def _path(namespace: str, plural: str, name: str = "") -> str:
    path = f"/api/v1/namespaces/{quote(namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path


def _path_of(body: Body) -> str:
    """Where an object that is given or was read lies."""
    metadata, kind = body["metadata"], body["kind"]
    if kind in PLURALS:
        return f"{OURS}/namespaces/{quote(metadata['namespace'])}/{PLURALS[kind]}/{quote(metadata['name'])}"
    version = body["apiVersion"]
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{group}/namespaces/{quote(metadata['namespace'])}/{kind.lower()}s/{quote(metadata['name'])}"


def _message(content: bytes) -> str:
    """The API server's own words."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
