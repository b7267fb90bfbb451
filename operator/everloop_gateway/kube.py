"""The only caller of the Kubernetes API: plain objects in and out, every call with an explicit time limit."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from kubernetes.aio import client, config

CALL_SECONDS = 5.0
LIST_SECONDS = 30.0
LIST_PAGE = 500
MERGE = "application/merge-patch+json"
# Short watches: one that has gone silent behind a dead API server is noticed within this time.
WATCH_SECONDS = 30


class ApiUnavailable(Exception):
    """The API server cannot be reached, or answers that it cannot serve now; the same call may be repeated."""


class ApiRefused(Exception):
    """The API server refused the call."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


async def connect() -> Kube:
    """Connect with the pod's service account, or outside a cluster with the file that KUBECONFIG names."""
    settings = client.Configuration()
    if os.environ.get("KUBECONFIG"):
        await config.load_kube_config(client_configuration=settings)
    else:
        config.load_incluster_config(client_configuration=settings)
    return Kube(client.ApiClient(settings))


class Kube:
    """A thin adapter over kubernetes.aio's transport."""

    def __init__(self, api: client.ApiClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._failing_since: float | None = None

    def outage_seconds(self) -> float:
        """For how long this process has not been served: unreachable, or not known there any more (401)."""
        return 0.0 if self._failing_since is None else self._clock() - self._failing_since

    def _served(self, served: bool) -> None:
        if served:
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = self._clock()

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def get(self, path: str) -> dict[str, Any] | None:
        """Read one object; None if there is none. Raises ApiUnavailable, ApiRefused."""
        try:
            return await self._call("GET", path, {}, None, CALL_SECONDS)
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise

    async def create(self, path: str, body: dict[str, Any], field_manager: str) -> dict[str, Any] | None:
        """Create an object; None if its name is taken. A field that it cannot have is refused, not dropped.

        Raises ApiUnavailable, ApiRefused.
        """
        query = {"fieldManager": field_manager, "fieldValidation": "Strict"}
        try:
            return await self._call("POST", path, query, body, CALL_SECONDS)
        except ApiRefused as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return None
            raise

    async def delete(self, path: str) -> None:
        """Delete an object, if it is there. Raises ApiUnavailable, ApiRefused."""
        try:
            await self._call("DELETE", path, {}, None, CALL_SECONDS)
        except ApiRefused as error:
            if error.status != 404:
                raise

    async def merge(self, path: str, body: dict[str, Any], field_manager: str) -> None:
        """Change an object by a merge patch, if it is there. Raises ApiUnavailable, ApiRefused."""
        try:
            await self._call("PATCH", path, {"fieldManager": field_manager}, body, CALL_SECONDS)
        except ApiRefused as error:
            if error.status != 404:
                raise

    async def list(self, path: str, selectors: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """List all objects, in pages, with the resource version to watch from. Raises ApiUnavailable, ApiRefused."""
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {**selectors, "limit": str(LIST_PAGE)} | ({"continue": token} if token else {})
            page = await self._call("GET", path, query, None, LIST_SECONDS)
            items += page.get("items") or []
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, page["metadata"]["resourceVersion"]

    async def watch(self, path: str, selectors: Mapping[str, str], version: str) -> AsyncIterator[dict[str, Any]]:
        """Follow changes since a resource version; ends after WATCH_SECONDS. Raises ApiUnavailable, ApiRefused."""
        query = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        response = await self._send("GET", path, query, None, WATCH_SECONDS + CALL_SECONDS)
        try:
            self._served(_is_served(response.status))
            if response.status != 200:
                _raise_refusal(response.status, await _read(response))
            async for line in _lines(response):
                yield json.loads(line)
        finally:
            response.release()

    async def _call(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any] | None, seconds: float
    ) -> dict[str, Any]:
        response = await self._send(method, path, query, body, seconds)
        try:
            content = await _read(response)
        finally:
            response.release()
        self._served(_is_served(response.status))
        if not 200 <= response.status < 300:
            _raise_refusal(response.status, content)
        value: dict[str, Any] = json.loads(content)
        return value

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any] | None, seconds: float
    ) -> aiohttp.ClientResponse:
        method, url, headers, sent, _ = await self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"} | ({"Content-Type": MERGE} if method == "PATCH" else {}),
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(method, url, headers, sent, _request_timeout=seconds)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._served(False)
            raise ApiUnavailable(f"{type(error).__name__}") from error
        response: aiohttp.ClientResponse = answer.response
        return response


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiUnavailable(f"{type(error).__name__}") from error


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await response.content.readline()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnavailable(f"{type(error).__name__}") from error
        if not line.endswith(b"\n"):
            return
        yield line


def _is_served(status: int) -> bool:
    return status < 500 and status not in (401, 408, 429)


def _raise_refusal(status: int, content: bytes) -> None:
    reason, message = "", f"HTTP {status}"
    with suppress(ValueError, AttributeError):
        answer = json.loads(content)
        reason, message = answer.get("reason") or "", answer.get("message") or message
    if status >= 500 or status in (408, 429):
        raise ApiUnavailable(message)
    raise ApiRefused(status, reason, message)


async def pause(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for at most so many seconds; was it set?"""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
