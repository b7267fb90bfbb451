"""The building blocks of the API's models: field types with their limits, and the rule helper."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
RELATIVE_PATH_PATTERN = r"^(([^/.][^/]*|\.[^/.][^/]*)(/([^/.][^/]*|\.[^/.][^/]*))*)?$"
"""A path below a volume: no leading or doubled slash, no `.` and no `..`."""


def rules(*validations: tuple[str, str]) -> dict[str, Any]:
    """CEL rules as `(rule, message)` for a model's `json_schema_extra`."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in validations]}


class ApiModel(BaseModel):
    """camelCase on the wire. Unknown fields are ignored: a newer version may have set them."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True)


ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""Name of another object (RFC 1123 subdomain)."""

RelativePath = Annotated[str, Field(max_length=1024, pattern=RELATIVE_PATH_PATTERN)]

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""A resource quantity such as `2`, `"500m"` or `"96Gi"`; never negative."""

ResourceName = Annotated[str, Field(max_length=253)]
Resources = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]

Text = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=40), WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 40})]
"""RFC 3339, UTC."""
Decimal = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?$")]
"""A number with a fraction, as a string: floats are not allowed in Kubernetes APIs."""
Count = Annotated[int, Field(ge=0)]
