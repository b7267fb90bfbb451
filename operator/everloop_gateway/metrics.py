"""What a gateway replica counts. Labels are the routes and kinds of calls that there are, never what a client sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everloop_gateway.holding import Kind

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

REQUESTS = Counter(
    "everloop_gateway_requests",
    "Answers to clients, by route and status code; a call that was held for long has 200 whatever came of it.",
    ["route", "code"],
    registry=REGISTRY,
)


UPSTREAM_RETRIES = Counter(
    "everloop_gateway_upstream_retries",
    "Calls that a session pod did not answer, and that are sent again, by kind.",
    ["kind"],
    registry=REGISTRY,
)
for _kind in Kind:
    UPSTREAM_RETRIES.labels(_kind.value)


class Waiting(Protocol):
    """A call as far as it is told here."""

    @property
    def reason(self) -> str:
        """What it waits for; empty if nothing is missing."""
        ...


class CallsUnderWay(Collector):
    """Calls under way."""

    def __init__(self) -> None:
        self._calls: dict[object, tuple[Kind, Waiting]] = {}

    @contextmanager
    def under_way(self, kind: Kind, progress: Waiting) -> Iterator[None]:
        """A call is one of them for as long as the block lasts."""
        call = object()
        self._calls[call] = kind, progress
        try:
            yield
        finally:
            del self._calls[call]

    def collect(self) -> Iterator[Metric]:
        """Their number, and how many of them wait for a session or the Kubernetes API to be back."""
        for name, text, held_only in (
            ("everloop_gateway_calls", "Calls under way, by kind.", False),
            ("everloop_gateway_held_calls", "Of these, calls that wait for what they need to be back.", True),
        ):
            family = GaugeMetricFamily(name, text, labels=["kind"])
            for kind in Kind:
                number = sum(1 for of, call in self._calls.values() if of is kind and (call.reason or not held_only))
                family.add_metric([kind.value], number)
            yield family


CALLS = CallsUnderWay()
REGISTRY.register(CALLS)


class Counting:
    """Counts the answers of an ASGI application."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                REQUESTS.labels(_route(scope), str(message["status"])).inc()
            await send(message)

        await self._application(scope, receive, counted)


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "none"
