"""Identifiers of the Tinker wire: how they are built, taken apart and named in Kubernetes. Pure functions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

StreamKind = Literal["train", "sample"]

_STREAM = re.compile(r"(?P<session>s-[0-9a-f]{16}-[0-9a-f]{16}):(?P<kind>train|sample):(?P<number>0|[1-9][0-9]{0,17})")
_REQUEST = re.compile(r"(?P<stream>[^/]+):(?P<seq>0|[1-9][0-9]{0,18})")
# The name's alphabet is that of the session pod; it also makes every path fit for a header.
_TINKER_PATH = re.compile(
    r"tinker://(?P<model>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)"
    r"/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,254})"
)


class MalformedId(ValueError):
    """An identifier that this gateway can never have given out; the message names the field."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A model (kind train) or a sampling session (kind sample) of a client session."""

    session_id: str
    kind: StreamKind
    number: int

    @property
    def id(self) -> str:
        """The id on the wire: ``{session_id}:{train|sample}:{number}``."""
        return f"{self.session_id}:{self.kind}:{self.number}"

    @property
    def binding_name(self) -> str:
        """Name of the ConfigMap that says which TrainingSession serves this stream."""
        return f"evb-{hashlib.sha256(self.id.encode()).hexdigest()[:20]}"


def parse_stream(text: str, field: str, kind: StreamKind | None = None) -> Stream:
    """Take a model_id or sampling_session_id apart.

    Raises:
        MalformedId: not of that form, or not of the wanted kind.
    """
    match = _STREAM.fullmatch(text)
    if match is None or (kind is not None and match["kind"] != kind):
        wanted = "{session_id}:" + (kind or "train|sample") + ":{number}"
        raise MalformedId(f"{field}: {shorten(text)!r} is not of the form {wanted}")
    found: StreamKind = "train" if match["kind"] == "train" else "sample"
    return Stream(match["session"], found, int(match["number"]))


def parse_request_id(text: str) -> Stream:
    """The stream that a request_id (``{stream}:{seq}``) belongs to. Raises MalformedId."""
    match = _REQUEST.fullmatch(text)
    if match is None:
        raise MalformedId(f"request_id: {shorten(text)!r} is not of the form {{stream}}:{{seq}}")
    return parse_stream(match["stream"], "request_id")


def parse_tinker_path(text: str, field: str) -> Stream:
    """The model that a path like ``tinker://{model_id}/weights/{name}`` belongs to. Raises MalformedId."""
    match = _TINKER_PATH.fullmatch(text)
    if match is None:
        wanted = "tinker://{model_id}/{weights|sampler_weights|external_weights}/{name}"
        raise MalformedId(f"{field}: {shorten(text)!r} is not of the form {wanted}")
    return parse_stream(match["model"], field, "train")


def shorten(text: str, limit: int = 120) -> str:
    """Text from outside, short enough for an error message."""
    return text if len(text) <= limit else text[:limit] + "..."
