"""A small client of the API server: requests and watches, with verified TLS, out of the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ApiClient:
    """A client with the credentials of a kubeconfig that this package wrote.

    Every request has a connection of its own, so a client may be used from several threads. Requests raise `ApiError`
    for a refusal and OSError or http.client.HTTPException while the server can't be reached.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._token = config["users"][0]["user"]["token"]
        self._address = urlsplit(cluster["server"]).netloc
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Return the JSON value, or the text if it is none, that the server answers."""
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=5)
        try:
            answer = self._send(connection, method, path, body, content_type)
            text = answer.read().decode()
        finally:
            connection.close()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text

    def get(self, path: str) -> Any:
        """GET."""
        return self.request("GET", path)

    def delete(self, path: str) -> bool:
        """Delete an object; returns whether it was there."""
        try:
            self.request("DELETE", path)
        except ApiError as e:
            if e.status != 404:
                raise
            return False
        return True

    def follow(self, path: str) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield all objects of a collection by namespace/name, and again after every change.

        Returns when the server ends the watch; the caller starts again, which lists anew.
        """
        listing = self.get(path)
        objects = {_key(item): item for item in listing["items"]}
        yield objects
        query = {"watch": "1", "resourceVersion": listing["metadata"]["resourceVersion"], "timeoutSeconds": "300"}
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=310)
        try:
            answer = self._send(connection, "GET", f"{path}?{urlencode(query)}", None, "")
            while line := answer.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    objects.pop(_key(event["object"]), None)
                else:
                    objects[_key(event["object"])] = event["object"]
                yield objects
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPSConnection, method: str, path: str, body: Any, content_type: str
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status >= 400:
            raise ApiError(answer.status, answer.read().decode()[:1000])
        return answer


def _key(item: dict[str, Any]) -> str:
    metadata = item["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"
