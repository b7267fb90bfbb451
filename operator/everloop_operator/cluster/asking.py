"""Reading the report of a server in a pod, whose image, and so whose answer, is the tenant's choice."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from everloop_operator.loop.ports import Silent, Unanswered

LARGEST_REPORT = 4 << 20

T = TypeVar("T", bound=BaseModel)


def origin(ip: str, port: int) -> str:
    """The beginning of the addresses of a server."""
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


def session() -> aiohttp.ClientSession:
    """A client of pods, for use within a running event loop.

    Pods are dialled directly, without proxy, and many of them seldom: no connection is kept.
    """
    # Not decompressed: a small answer must not become a large one here.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), trust_env=False, auto_decompress=False
    )


async def read(client: aiohttp.ClientSession, url: str, token: str) -> bytes:
    """The body of an answer. Raises Unanswered, and what aiohttp raises."""
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    async with client.get(url, headers=headers, allow_redirects=False) as answer:
        if answer.status != 200:
            raise Unanswered(f"HTTP {answer.status}")
        content = bytearray()
        async for chunk in answer.content.iter_any():
            content += chunk
            if len(content) > LARGEST_REPORT:
                raise Unanswered("the report is too large")
        return bytes(content)


def unanswered(error: Exception) -> Unanswered:
    """What an exception of aiohttp or of the system says of the server."""
    kind = Silent if isinstance(error, TimeoutError) else Unanswered
    return kind(type(error).__name__)


def parse(model: type[T], content: bytes) -> T:
    """The report in a body. Raises Unanswered naming the field."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Unanswered(f"the report can't be read: {place}: {first['msg']}") from None
