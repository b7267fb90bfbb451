"""Our request models against the SDK's own types: same fields, same defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from everloop_trainer.server import schemas
from tests.server.sdk import run_client

MODELS = [
    "CreateModelRequest",
    "LoraConfig",
    "GetInfoRequest",
    "AdamParams",
    "OptimStepRequest",
    "LoadWeightsRequest",
    "SaveWeightsRequest",
    "SaveWeightsForSamplerRequest",
    "EncodedTextChunk",
    "ImageChunk",
    "ModelInput",
    "SamplingParams",
    "SampleRequest",
    "FutureRetrieveRequest",
    "SamplingSessionFuturesTarget",
    "FuturesRetrieveRequest",
]
SDK_FIELDS = f"""
import importlib, json, pydantic
from pydantic_core import PydanticUndefined
places = {{"AdamParams": "optimizer", "ModelInput": "_pydantic_types.model_input",
          "SamplingParams": "_pydantic_types.sampling_params", "LoraConfig": "lora_config",
          "SamplingSessionFuturesTarget": "futures_retrieve_request"}}
snake = lambda name: "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
found = {{}}
for name in {MODELS!r}:
    model = getattr(importlib.import_module("tinker.types." + places.get(name, snake(name))), name)
    found[name] = {{}}
    for field, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, pydantic.BaseModel):
            default = default.model_dump()
        found[name][field] = ["required"] if default is PydanticUndefined else ["default", default]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sdk_fields() -> Any:
    """Field names and defaults of the SDK's models, asked of the SDK."""
    return run_client(SDK_FIELDS)


def our_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Field names and defaults in the shape that SDK_FIELDS prints."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump()
        found[name] = ["required"] if default is PydanticUndefined else ["default", default]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_fields_and_defaults_equal_the_sdks(sdk_fields: Any, name: str) -> None:
    """A field that the SDK gains, loses or defaults otherwise makes this fail."""
    assert json.loads(json.dumps(our_fields(getattr(schemas, name)))) == sdk_fields[name]


def test_unknown_fields_are_tolerated() -> None:
    """A newer SDK may send fields that we do not know."""
    asked = schemas.FutureRetrieveRequest.model_validate({"request_id": "r", "of_tomorrow": 1})
    assert asked.request_id == "r"
