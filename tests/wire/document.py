"""The OpenAPI document of what the SDK speaks to a gateway: of the gateway's own routes and the SDK's own types."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.routing import Match, Route

from everloop_gateway import wire
from everloop_gateway.app import App
from everloop_gateway.calls import Calls
from everloop_gateway.checkpoints import Checkpoints
from everloop_gateway.downloads import ROUTE, Downloads
from everloop_gateway.listings import Listings
from tests.prepared import client_python

Document = dict[str, Any]

OPEN = (f"{wire.PREFIX}/healthz", ROUTE)
"""Paths of what is answered without an API key."""
REFERENCES = "#/components/schemas/"
REFUSAL = {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string", "minLength": 1}}}


def sdk_calls() -> Document:
    """All calls of the SDK, told by a process of its own."""
    program = Path(__file__).with_name("sdk_calls.py")
    done = subprocess.run([client_python(), str(program)], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr[-3000:]
    found: Document = json.loads(done.stdout)
    return found


def routes() -> list[Route]:
    """What a gateway answers below the path of the API, by itself or through a session pod."""
    nothing: Any = None  # none of it is asked anything here
    calls = Calls(nothing, nothing, nothing, stand_ins=False)
    listings, checkpoints = Listings(nothing, nothing, calls), Checkpoints(nothing, calls)
    downloads = Downloads(nothing, nothing, calls)
    app = App(nothing, calls, listings, checkpoints, downloads, asyncio.Event(), batched_polls=True)
    return [route for route in app.routes() if route.path.startswith(wire.PREFIX) and ":path" not in route.path]


def document(told: Document, served: list[Route], examples: Mapping[str, Any] | None = None) -> Document:
    """Each route with what the SDK sends to it; one that it has no call for takes any JSON object.

    Args:
        told: calls of the SDK.
        served: routes of the gateway.
        examples: right bodies by path, of those that nobody draws.
    """
    paths: Document = {}
    for route in served:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            calls = [call for call in told["calls"] if _is_to(call, method, route)]
            operation = paths.setdefault(route.path, {})[method.lower()] = _operation(route, method, calls)
            example = (examples or {}).get(route.path.removeprefix(f"{wire.PREFIX}/"))
            if example is not None:
                operation["requestBody"]["content"][wire.JSON]["example"] = example
    return {
        "openapi": "3.1.0",
        "info": {"title": "What the tinker SDK speaks to a gateway", "version": "0"},
        "paths": paths,
        "components": {
            "schemas": _tolerant(told["definitions"]),
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


def unserved(told: Document, served: list[Route]) -> set[str]:
    """Calls of the SDK that no route is there for."""
    return {
        f"{call['method']} {call['path']}"
        for call in told["calls"]
        if not any(_is_to(call, call["method"], route) for route in served)
    }


def uncalled(told: Document, served: list[Route]) -> set[str]:
    """Paths of routes that the SDK has no call for."""
    return {
        route.path
        for route in served
        for method in (route.methods or set()) - {"HEAD"}
        if not any(_is_to(call, method, route) for call in told["calls"])
    }


def operations(document: Document) -> Iterator[tuple[str, Document]]:
    """Each operation by its method and path."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def own_fields(document: Document, operation: Document) -> set[str]:
    """The outermost fields of a body of JSON."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get(wire.JSON, {}).get("schema", {})
    name = schema.get("$ref", "").removeprefix(REFERENCES)
    return set((document["components"]["schemas"][name] if name else schema).get("properties", {}))


def field_names(document: Document) -> set[str]:
    """The names of all that a request may hold."""
    schemas = document["components"]["schemas"]
    found: set[str] = set()
    left: list[Any] = [[each["parameters"], each.get("requestBody")] for _, each in operations(document)]
    met: set[str] = set()
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            properties = part.get("properties")
            found |= set(properties) if isinstance(properties, Mapping) else set()
            found |= {part["name"]} if "in" in part else set()
            name = str(part.get("$ref", "")).removeprefix(REFERENCES)
            if name and name not in met:
                met.add(name)
                left.append(schemas[name])
            left += part.values()
        elif isinstance(part, list):
            left += part
    return found


def _tolerant(schema: Any) -> Any:
    """The same with unknown fields allowed, which the SDK does not send, but a newer one may."""
    if isinstance(schema, list):
        return [_tolerant(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: _tolerant(each) for name, each in schema.items() if not (name == "additionalProperties" and each is False)
    }


def _is_to(call: Document, method: str, route: Route) -> bool:
    scope = {"type": "http", "path": call["path"], "method": method}
    return bool(call["method"] == method and route.matches(scope)[0] is Match.FULL)


def _operation(route: Route, method: str, calls: list[Document]) -> Document:
    schemas: Document = {}
    for call in calls:
        schemas |= call["schemas"]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in sorted(route.param_convertors)
    ]
    parameters += [
        {"name": role.removeprefix("query "), "in": "query", "schema": schema}
        for role, schema in sorted(schemas.items())
        if role.startswith("query ")
    ]
    answer = {"content": {wire.JSON: {"schema": schemas["answer"]}}} if "answer" in schemas else {}
    refused = {"description": "refused", "content": {wire.JSON: {"schema": REFUSAL}}}
    found = {
        "parameters": parameters,
        "responses": {"2XX": {"description": "done", **answer}, "4XX": refused},
        "security": [] if route.path in OPEN else [{"key": []}],
    }
    body = _body(calls) if calls else {wire.JSON: {"schema": {"type": "object"}}} if method in ("POST", "PUT") else {}
    return found | ({"requestBody": {"required": True, "content": body}} if body else {})


def _body(calls: list[Document]) -> Document:
    """The body of the first call that has one: calls to the same route have the same."""
    call = next((call for call in calls if call["has_body"]), None)
    if call is None:
        return {}
    schemas = call["schemas"]
    if call["content_type"] != wire.JSON:
        return {call["content_type"]: {"schema": {"type": "string", "format": "binary"}}}
    if "body" in schemas:
        return {wire.JSON: {"schema": schemas["body"]}}
    fields = {name: schemas[f"field {name}"] for name in call["fields"]}
    return {wire.JSON: {"schema": {"type": "object", "properties": fields, "required": list(fields)}}}
