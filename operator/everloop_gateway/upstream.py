"""Sending a call to the session pod that serves it now, again and again until there is a definitive answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import structlog

from everloop_gateway.bindings import Bindings
from everloop_gateway.connecting import CONNECT_SECONDS, Connector
from everloop_gateway.holding import Kind, is_definitive
from everloop_gateway.kube import ApiRefused, ApiUnavailable, pause
from everloop_gateway.metrics import UPSTREAM_RETRIES
from everloop_gateway.routing import Binding, Gone, Incarnation, Settle, Target, find_target
from everloop_gateway.state import Sessions
from everloop_gateway.waking import Waker
from everloop_http.resources import LARGE_BYTES
from everloop_operator.api import names, tokens

# A pod answers a submit once it is on disk, and holds a poll for 30 s; beyond that it is frozen, or its node is
# gone without a word. The call is then sent again, which is safe by its number.
SUBMIT_SECONDS = 10.0
POLL_SECONDS = 35.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 1.0
API_PAUSE_SECONDS = 0.5
# Answers of at least so many bytes are large, and so many of a session are read at a time.
MOST_LARGE = 4
# Names the incarnation that a call is meant for, and in the answer the pod that gave it.
POD_UID_HEADER = "X-Everloop-Pod-UID"

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, of a session pod or of our own."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to the session pod."""

    kind: Kind
    path: str
    body: bytes
    content_type: str
    accept: str
    extra_headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A call that got no definitive answer, and why; it is sent again."""

    reason: str


@dataclass(slots=True)
class Progress:
    """What a held call is waiting for, for whoever decides what its client is told meanwhile."""

    reason: str = ""
    sent: bool = False
    outage: Callable[[], float] = lambda: 0.0

    def waits(self, reason: str) -> None:
        """It waits, and for this."""
        if reason != self.reason:
            log.debug("call waits", reason=reason)
        self.reason = reason


class Upstream:
    """Sends calls to session pods by incarnation."""

    def __init__(
        self,
        sessions: Sessions,
        bindings: Bindings,
        http: aiohttp.ClientSession,
        master: Callable[[], bytes],
        waker: Waker,
    ) -> None:
        self._waker = waker
        self._sessions = sessions
        self._bindings = bindings
        self._http = http
        self._master = master
        self._reading: dict[str, asyncio.Semaphore] = {}

    async def deliver(self, binding: Binding, call: Call, progress: Progress) -> Answer | Gone:
        """Send until there is a definitive answer; waits for ever, and may be cancelled at any time.

        Raises ApiRefused.
        """
        return await self.until_done(binding, call.kind, lambda target: self._send(target, call), progress)

    async def until_done(
        self, binding: Binding, kind: Kind, work: Callable[[Target], Awaitable[T | Unanswered]], progress: Progress
    ) -> T | Gone:
        """Do something with the pod of the current incarnation, again with each that follows, until it is done.

        `work` is cancelled when its incarnation has been replaced. Raises ApiRefused.
        """
        key = (binding.namespace, binding.session)
        progress.outage = lambda: self._sessions.outage_seconds(key)
        seconds = FIRST_PAUSE_SECONDS
        while True:
            change = self._sessions.change(key)
            found = find_target(binding, self._sessions.get(key), self._missing(key))
            if isinstance(found, Gone):
                return found
            if isinstance(found, Settle):
                binding = await self._settle(binding, found, progress)
                continue
            if isinstance(found, Target):
                outcome = await self._attempt(key, found, work, progress)
                if not isinstance(outcome, Unanswered):
                    self._sessions.call_answered(key)
                    return outcome
                UPSTREAM_RETRIES.labels(kind.value).inc()
            else:
                progress.waits(found.reason)
                if found.wakes:
                    await self._waker.wake(key, found.wakes)
            self._sessions.call_failed(key)
            if await pause(change, seconds):
                seconds = FIRST_PAUSE_SECONDS
            else:
                seconds = min(seconds * 1.5, LONGEST_PAUSE_SECONDS)

    async def _settle(self, binding: Binding, found: Settle, progress: Progress) -> Binding:
        return await until_available(lambda: self._bindings.settle(binding, found), progress)

    def _missing(self, key: tuple[str, str]) -> float:
        return 0.0 if self._sessions.get(key) is not None else self._sessions.missing_seconds(key)

    async def _attempt(
        self,
        key: tuple[str, str],
        target: Target,
        work: Callable[[Target], Awaitable[T | Unanswered]],
        progress: Progress,
    ) -> T | Unanswered:
        """One call to one incarnation, aborted when another takes its place."""
        progress.sent = True
        sending = asyncio.ensure_future(work(target))
        watching = asyncio.ensure_future(self._replaced(key, target.incarnation))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                progress.waits("its session pod was replaced")
                return Unanswered("it was replaced")
            outcome = sending.result()
        finally:
            progress.sent = False
            sending.cancel()
            watching.cancel()
        if isinstance(outcome, Unanswered):
            view = self._sessions.get(key)
            state = view.state if view is not None else f"{names.TRAINING_SESSION_KIND} {key[0]}/{key[1]}"
            progress.waits(f"{state}; its session pod does not answer ({outcome.reason})")
        return outcome

    @asynccontextmanager
    async def open(self, target: Target, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """The pod's answer as it comes in. Raises aiohttp.ClientError, TimeoutError."""
        incarnation = target.incarnation
        headers = {
            "Authorization": f"Bearer {tokens.session_token(self._master(), target.uid, incarnation.attempt)}",
            POD_UID_HEADER: incarnation.pod_uid,
            "Content-Type": call.content_type,
            "Accept": call.accept,
            "Accept-Encoding": "identity",
            **call.extra_headers,
        }
        url = f"http://{_host(incarnation.ip)}:{names.TRAINER_PORT}{call.path}"
        async with self._http.request(
            call.method, url, data=call.body, headers=headers, allow_redirects=False
        ) as response:
            yield response

    async def _send(self, target: Target, call: Call) -> Answer | Unanswered:
        """The pod's definitive answer, or why there is none."""
        limit = POLL_SECONDS if call.kind.polls else SUBMIT_SECONDS
        try:
            async with asyncio.timeout(limit), self.open(target, call) as response:
                content = await self._read(target, response)
        except aiohttp.ClientError as error:  # among them one that is a TimeoutError too: no connection in time
            return Unanswered(type(error).__name__)
        except TimeoutError:
            return Unanswered(f"no answer within {limit:.0f} s")
        signed = is_signed(response, target)
        if signed and is_definitive(response.status):
            content_type = response.headers.get("content-type", "application/json")
            return Answer(response.status, content_type, content)
        if response.status not in (421, 502, 503):
            log.error(
                "session pod fails",
                path=call.path,
                status=response.status,
                signed=signed,
                pod_uid=target.incarnation.pod_uid,
            )
        return Unanswered(f"HTTP {response.status}")

    async def _read(self, target: Target, response: aiohttp.ClientResponse) -> bytes:
        """The body; large ones of a session a few at a time, since each is in memory until its client has it."""
        if response.content_length is not None and response.content_length < LARGE_BYTES:
            return await response.read()
        async with self._reading.setdefault(target.uid, asyncio.Semaphore(MOST_LARGE)):
            return await response.read()

    async def _replaced(self, key: tuple[str, str], incarnation: Incarnation) -> None:
        while True:
            change = self._sessions.change(key)
            view = self._sessions.get(key)
            if view is None or view.incarnation != incarnation:
                return
            await change.wait()


async def until_available(
    work: Callable[[], Awaitable[T]], progress: Progress, held: tuple[int, ...] = (401, 403)
) -> T:
    """Repeat a call to the Kubernetes API until it is available; refusals with a held status may pass, too.

    Raises ApiRefused.
    """
    while True:
        try:
            return await work()
        except ApiUnavailable as error:
            progress.waits(f"the Kubernetes API does not answer ({error})")
        except ApiRefused as error:
            if error.status not in held:
                raise
            # The gateway's own rights: a user can do nothing about them, and they may be put right meanwhile.
            log.error("Kubernetes API refuses the gateway", status=error.status, error=error.message)
            progress.waits("the gateway has not the rights it needs in this namespace")
        await asyncio.sleep(API_PAUSE_SECONDS)


def is_signed(response: aiohttp.ClientResponse, target: Target) -> bool:
    """Whether an answer is that pod's.

    Without its name on it, it is a refusal at the pod's door, or the pod is gone and its address was given to somebody
    else.
    """
    return response.headers.get(POD_UID_HEADER) == target.incarnation.pod_uid


def http_client() -> aiohttp.ClientSession:
    """A client for session pods: no proxy, no cookies, no limit on concurrent calls. Needs a running event loop.

    A round trip of a small operation is two calls, so that what a call costs here is felt: aiohttp parses in C.
    """
    return aiohttp.ClientSession(
        connector=Connector(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
