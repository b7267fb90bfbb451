"""kopf's lists, emptied on their way: they only say from where its watches go on.

kopf lists a kind before it watches it, and again whenever a watch can't go on, and works through each object of a list
as if that had changed. Resync reads the same objects page by page at a fraction of the cost. So kopf's lists come first
and are empty, and resync's follow: whatever changes in between is shown by the watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

NOTHING = "metadata.name=a,metadata.name=b"
"""A field selector that no object has."""
LIMIT = "limit"
"""Of kopf's calls lists alone have this parameter; they have it if `settings.watching.chunk_size` is set."""


class Unlisted:
    """A middleware of the HTTP client that kopf is given."""

    def __init__(self, lists: int, again: Callable[[], None]) -> None:
        """`lists` is how many kopf makes until it watches everything; `again` is called at each one after these."""
        self.begun = asyncio.Event()
        """Set once every watch has its beginning: a list that is read after that misses no change."""
        self._lists = lists
        self._again = again
        self._seen: set[str] = set()

    async def __call__(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """Sends a request; one for a list finds nothing."""
        if LIMIT not in request.url.query:
            return await send(request)
        # From the API server's memory: should that be behind, a watch only begins the earlier.
        request.url = request.url.without_query_params(LIMIT).extend_query(fieldSelector=NOTHING, resourceVersion="0")
        answer = await send(request)
        if answer.ok:
            self._note(request.url.path)
        return answer

    def _note(self, path: str) -> None:
        if self.begun.is_set():
            self._again()
            return
        self._seen.add(path)
        if len(self._seen) == self._lists:
            self.begun.set()
