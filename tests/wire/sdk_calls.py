"""What the SDK sends, and takes for an answer: each of its calls is made, and none leaves this process.

Run by the interpreter of the environment that holds the SDK; prints one JSON document, which `document.py` reads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from tinker._client import AsyncTinker
from tinker._models import StrictBase
from tinker._types import NoneType
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

RESOURCES = ("service", "training", "models", "weights", "sampling", "futures", "telemetry")
NOT_OF_USERS = ("get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage", "get_telemetry", "whoami")
"""Methods of RestClient that send nothing, or what only the administrators of an organization may."""
ARGUMENTS: dict[str, Any] = {
    "tinker_path": "tinker://run:train:0/external_weights/name",
    "checkpoint_id": "external_weights/name",
    "destination_project_id": "project",
}
"""What is parsed, stands for more than one part of a path, or has to be there; any other text is its own name."""
OF_RETRIEVAL = "retrieve_future"
"""Its answers are those of all operations, and mostly protobuf."""


class Sent(Exception):
    """A call has come as far as its request."""

    def __init__(self, answer: Any, request: Any) -> None:
        super().__init__(request.url)
        self.answer, self.request = answer, request


class Client(AsyncTinker):  # type: ignore[misc]  # its types are in another environment
    """The SDK's client, up to the wire."""

    async def request(self, cast_to: Any, options: Any, **_: Any) -> Any:
        raise Sent(cast_to, options)


class Holder:
    """As much of what the SDK keeps its clients in as its calls need."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @contextmanager
    def aclient(self, _pool: object) -> Iterator[Client]:
        yield self._client

    async def execute_with_retries(self, send: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        return await send(*arguments)

    def run_coroutine_threadsafe(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def get_telemetry(self) -> None:
        return None


class OnTheWire(GenerateJsonSchema):
    """JSON Schema of the SDK's types as they are in JSON, where bytes are base64."""

    def bytes_schema(self, schema: Any) -> dict[str, Any]:
        return {**super().bytes_schema(schema), "format": "byte"}


Described = tuple[dict[str, Any], dict[str, Any]]
"""A call, and the types that it names: those of its query's parameters and of its body and answer, by their role."""


def sent(method: Callable[..., Any]) -> Described:
    """What a method sends that is called with nothing but what it needs."""
    types = get_type_hints(inspect.unwrap(method))
    parameters = inspect.signature(method).parameters
    arguments = {
        name: _argument(name, types[name])
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty or name in ARGUMENTS
    }
    with _dumped() as bodies:
        try:
            result = method(**arguments)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Sent as found:
            return _described(found, types, bodies)
    raise AssertionError(f"{method}: it has sent nothing")


def _described(found: Sent, types: dict[str, Any], bodies: list[type[BaseModel]]) -> Described:
    request, path = found.request, found.request.url
    query = {name: types[name] for name in request.params}
    headers = request.headers if isinstance(request.headers, dict) else {}
    given, made_of = request.json_data, {}
    if bodies:
        made_of["body"] = bodies[0]
    if found.answer is not NoneType and not path.endswith(OF_RETRIEVAL):
        made_of["answer"] = found.answer
    call = {
        "method": request.method.upper(),
        "path": path,
        "query": sorted(query),
        "content_type": headers.get("Content-Type", "application/json"),
        "has_body": given is not None,
    }
    if isinstance(given, dict) and not bodies:  # put together of the method's own arguments
        call["fields"] = sorted(given)
        made_of |= {f"field {name}": types[name] for name in given}
    return call, made_of | {f"query {name}": kind for name, kind in query.items()}


@contextmanager
def _dumped() -> Iterator[list[type[BaseModel]]]:
    """The types of requests that are written meanwhile."""
    found: list[type[BaseModel]] = []
    dump = BaseModel.model_dump

    def noted(self: BaseModel, **options: Any) -> Any:
        found.extend([type(self)] if isinstance(self, StrictBase) else [])
        return dump(self, **{**options, "warnings": False})  # of fields that it lacks here

    BaseModel.model_dump = noted  # type: ignore[method-assign]  # there is no other place to see them all
    try:
        yield found
    finally:
        BaseModel.model_dump = dump  # type: ignore[method-assign]


async def _awaited(result: Any) -> Any:
    return await result


def _argument(name: str, kind: Any) -> Any:
    if kind is ForwardBackwardRequest:
        return ForwardBackwardRequest(ForwardBackwardInput(data=[], loss_fn="cross_entropy"), "run:train:0", 1)
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return kind.model_construct()
    return ARGUMENTS.get(name, name)


def _methods() -> Iterator[Callable[..., Any]]:
    """All of the SDK's that make one call each."""
    client = Client(api_key="tml-none", base_url="http://127.0.0.1:1")
    holder: Any = Holder(client)
    for name in RESOURCES:
        resource = getattr(client, name)
        for method, _ in inspect.getmembers(type(resource), inspect.iscoroutinefunction):
            if not method.startswith("_"):
                yield getattr(resource, method)
    rest = RestClient(holder)
    for method, _ in inspect.getmembers(RestClient, inspect.isfunction):
        if not method.startswith("_") and not method.endswith("_async") and method not in NOT_OF_USERS:
            yield getattr(rest, method)
    yield MethodType(InternalClientHolder._send_cancel_request, holder)


def main() -> None:
    """Print the calls, with the schemas of their parts by role, and what these schemas refer to."""
    calls = [sent(method) for method in _methods()]
    inputs = [
        ((index, role), "validation", TypeAdapter(kind))
        for index, (_, made_of) in enumerate(calls)
        for role, kind in made_of.items()
    ]
    schemas, definitions = TypeAdapter.json_schemas(
        inputs,  # type: ignore[arg-type]  # a tuple is as good a key as any
        ref_template="#/components/schemas/{model}",
        schema_generator=OnTheWire,
    )
    described = [
        {**call, "schemas": {role: schemas[(index, role), "validation"] for role in made_of}}
        for index, (call, made_of) in enumerate(calls)
    ]
    print(json.dumps({"calls": described, "definitions": definitions.get("$defs", {})}))


if __name__ == "__main__":
    main()
