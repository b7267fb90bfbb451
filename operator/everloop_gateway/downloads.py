"""URLs of the files of checkpoints: given to those who may read them, and open to whoever has them, for a while.

The clients that fetch them send no API key. What opens a URL is its MAC over namespace, checkpoint, file and time: any
replica can check it, after any restart, and it opens nothing else.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from urllib.parse import urlencode

from everloop_gateway import wire
from everloop_gateway.calls import Calls
from everloop_gateway.cluster import Cluster
from everloop_gateway.file_stream import FileStream
from everloop_gateway.held import error_answer, json_answer
from everloop_gateway.holders import get
from everloop_gateway.ids import MalformedId, parse_stream, parse_tinker_path
from everloop_gateway.keys import Principal
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Binding, Gone
from everloop_gateway.stopped import GONE
from everloop_gateway.upstream import Answer, Progress, Upstream, until_available
from everloop_operator.api import tokens

EXTERNAL = "external_weights"
ARCHIVE = "checkpoint.tar"
"""What session pods call the archive of a checkpoint of another kind."""
ROUTE = f"{wire.PREFIX}/downloads/{{namespace}}/{{run_id}}/{{kind}}/{{name}}/{{key}}/{{file}}"
URL_SECONDS = 3600
"""For how long a URL opens its file; clients ask for new ones when it has five minutes left."""
REDIRECTS = 10
"""How often a client that waits for a pod is sent to the same file again, which is as often as Python's urllib goes."""

_HOST = re.compile(r"[A-Za-z0-9.\-_\[\]:]{1,260}")
_TIME = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint; `key` names what was stored, whatever gets its name later."""

    namespace: str
    run_id: str
    kind: str
    name: str
    key: str
    file: str

    @property
    def path(self) -> str:
        """Its address within the namespace: none of the parts holds a slash."""
        return f"{self.run_id}/{self.kind}/{self.name}/{self.key}/{self.file}"


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose files a key asks for, or whose `archive`; `base` is how the client reaches this gateway."""

    principal: Principal
    run_id: str
    kind: str
    name: str
    archive: bool
    base: str


class Downloads:
    """Gives out URLs, and opens them."""

    def __init__(self, cluster: Cluster, upstream: Upstream, calls: Calls) -> None:
        self._cluster = cluster
        self._upstream = upstream
        self._calls = calls

    async def urls(self, asked: Asked, progress: Progress) -> Answer:
        """SDK `ExternalWeightsUrlsResponse` or, of an archive, `CheckpointArchiveUrlResponse`. Raises Refusal."""
        path = f"tinker://{asked.run_id}/{asked.kind}/{asked.name}"
        try:
            parse_tinker_path(path, "checkpoint")
        except MalformedId as error:
            raise Refusal(404, str(error)) from None
        if asked.archive and asked.kind == EXTERNAL:
            raise Refusal(404, "checkpoint: external weights are files of their own, see external_weights_urls")
        binding = await self._calls.source(asked.principal, path, "checkpoint", progress)
        below = f"training_runs/{binding.id}/checkpoints/{asked.kind}/{asked.name}/files"
        answer = await self._upstream.deliver(binding, get(below), progress)
        if isinstance(answer, Gone):
            return error_answer(GONE, answer.detail)
        if answer.status != 200:
            return answer
        found, expires = json.loads(answer.body), int(time.time()) + URL_SECONDS
        where = asked.principal.namespace, binding.id, asked.kind, asked.name, found["key"]
        urls = {file: asked.base + self._target(File(*where, file), expires) for file in found["files"]}
        until = datetime.fromtimestamp(expires, UTC).isoformat().replace("+00:00", "Z")
        return json_answer({**({"url": urls[ARCHIVE]} if asked.archive else {"urls": urls}), "expires": until})

    def _target(self, file: File, expires: int) -> str:
        mac = tokens.download_mac(self._cluster.master(), file.namespace, expires, file.path)
        route = f"{wire.PREFIX}/downloads/{file.namespace}/{file.path}"
        return f"{route}?{urlencode({'expires': expires, 'mac': mac})}"

    def verified(self, parts: Mapping[str, str], query: Mapping[str, str]) -> File:
        """What a URL opens now. Raises Refusal."""
        file = File(**{field.name: parts[field.name] for field in fields(File)})
        expires = query.get("expires", "")
        given = _TIME.fullmatch(expires) is not None and tokens.verify_download(
            self._cluster.master(), file.namespace, int(expires), file.path, query.get("mac", "")
        )
        if not given:
            raise Refusal(403, "mac: this URL was not given out here")
        if time.time() >= int(expires):
            raise Refusal(403, "expires: this URL is of no use any more; ask for another one")
        return file

    def stream(self, file: File, query: Mapping[str, str], headers: Mapping[str, str]) -> FileStream:
        """The answer to who has the URL of a file."""
        path = f"{wire.PREFIX}/training_runs/{file.run_id}/checkpoints/{file.kind}/{file.name}/files"
        path = f"{path}/{file.key}/{file.file}"
        return FileStream(self._upstream, lambda progress: self._binding(file, progress), path, headers, again(query))

    async def _binding(self, file: File, progress: Progress) -> Binding:
        stream = parse_stream(file.run_id, "training_run_id", "train")
        progress.outage = self._cluster.api_outage_seconds
        bindings = self._cluster.bindings
        binding = await until_available(lambda: bindings.get(file.namespace, stream), progress)
        if binding is None:
            raise Refusal(404, f"training_run_id: {file.run_id!r} is not known; its storage may have been deleted")
        return binding


def again(query: Mapping[str, str]) -> str:
    """The query of the address that a client which has waited long is sent to; empty if it was sent on often enough."""
    waited = int(text) if _TIME.fullmatch(text := query.get("waited", "0")) else REDIRECTS
    return f"?{urlencode({**query, 'waited': waited + 1})}" if waited < REDIRECTS else ""


def base_url(scheme: str, headers: Mapping[str, str]) -> str:
    """How a client reaches this gateway, as it and what stands before the gateway say. Raises Refusal.

    Whoever lies about it gets URLs of no use.
    """
    host, proxy = headers.get("host", ""), headers.get("x-forwarded-proto", "")
    if _HOST.fullmatch(host) is None:
        raise Refusal(400, "Host: names no host")
    return f"{proxy if proxy in ('http', 'https') else scheme}://{host}"
