"""The building blocks of the API's models: field types with their limits, and the rule helper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
CONTROL = r"\x00-\x1f\x7f"
"""Within brackets of a pattern: line breaks and other control characters."""
RELATIVE_PATH_PATTERN = rf"^(\.?[^/.{CONTROL}][^/{CONTROL}]*(/\.?[^/.{CONTROL}][^/{CONTROL}]*)*)?$"
"""A path below a volume: no leading or doubled slash, no `.` and no `..`."""
ABSOLUTE_PATH_PATTERN = rf"^(/\.?[^/.:{CONTROL}][^/:{CONTROL}]*)+$"
"""A directory below the root: no doubled or trailing slash, no `.` and no `..`."""


def rules(*validations: tuple[str, str]) -> dict[str, Any]:
    """CEL rules as `(rule, message)` for a model's `json_schema_extra`."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in validations]}


def one_of(values: Iterable[str]) -> str:
    """A CEL list."""
    return f"[{', '.join(repr(value) for value in sorted(values))}]"


def begins(name: str, beginnings: Iterable[str]) -> str:
    """A CEL expression: whether a string begins with one of these."""
    return " || ".join(f"{name}.startsWith('{beginning}')" for beginning in beginnings)


class ApiModel(BaseModel):
    """camelCase on the wire. Unknown fields are ignored: a newer version may have set them."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True)


ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=SUBDOMAIN_PATTERN)]
"""Name of another object (RFC 1123 subdomain)."""

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""Name within a pod (RFC 1123 label)."""

RelativePath = Annotated[str, Field(max_length=1024, pattern=RELATIVE_PATH_PATTERN)]

AbsolutePath = Annotated[str, Field(max_length=512, pattern=ABSOLUTE_PATH_PATTERN)]

OptionalName = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
"""Name of another object, or nothing."""


class LocalReference(ApiModel):
    """Another object of the namespace."""

    name: ObjectName = Field(description="Its name.")


LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
LABEL_KEYS = (
    f"self.all(k, k.matches('{LABEL_KEY_PATTERN}'))",
    "every key must be a name, or a DNS name, `/` and a name",
)
"""CEL rule for a map whose keys are keys of labels or annotations: a structural schema can't limit them."""
Labels = Annotated[dict[str, LabelValue], Field(max_length=32, json_schema_extra=rules(LABEL_KEYS))]

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


class ContainerResources(ApiModel):
    """Requests and limits of a container, as in a pod."""

    requests: Resources = Field(
        default={}, description="What the scheduler sets aside, by resource name; quantities as in a pod."
    )
    limits: Resources = Field(
        default={}, description="What the container may use at most, by resource name; GPUs are asked for here."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
                "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
                "a request must not exceed its limit",
            ),
            (
                "!has(self.requests) || self.requests.all(k, !k.contains('/') || (has(self.limits) && k in self.limits "
                "&& quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) == 0))",
                "a request for devices, such as nvidia.com/gpu, must equal their limit",
            ),
            (
                "!has(self.limits) || self.limits.all(k, !k.contains('/') || "
                "quantity(string(self.limits[k])).isInteger())",
                "devices, such as nvidia.com/gpu, are counted in whole numbers",
            ),
        )
    )


Text = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=40), WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 40})]
"""RFC 3339, UTC."""
Decimal = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?$")]
"""A number with a fraction, as a string: floats are not allowed in Kubernetes APIs."""
SignedDecimal = Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?$")]
"""The same, with a sign."""
Count = Annotated[int, Field(ge=0)]
