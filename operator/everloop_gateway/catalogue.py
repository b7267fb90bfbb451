"""The catalogue: base models by their names, and the TrainingSessions that may be made for them. Pure functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from everloop_operator.api import names

GREATEST_LIMIT = 100
# With the hash and a counter behind it, a name stays within the 40 characters that a TrainingSession may have.
_READABLE_LENGTH = 26
_HASH_LENGTH = 8


class InvalidCatalogue(ValueError):
    """The catalogue ConfigMap is not what it should be; the message names the field."""


@dataclass(frozen=True, slots=True)
class SessionTemplate:
    """What a TrainingSession made on demand is made of.

    source is its spec.baseModel.source, metadata its labels and annotations, spec all of its spec but baseModel.
    """

    source: dict[str, Any]
    metadata: dict[str, Any]
    spec: dict[str, Any]
    namespaces: tuple[str, ...]
    """Where it may be made; empty: wherever the key's subject may."""
    limit: int
    """How many of them there may be in a namespace."""

    def allowed_in(self, namespace: str) -> bool:
        """May a session be made in this namespace, as far as the catalogue is asked?"""
        return not self.namespaces or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A base model by its names; without a template no session is made for it."""

    name: str
    aliases: tuple[str, ...] = ()
    tokenizer_id: str | None = None
    template: SessionTemplate | None = None

    def creatable_in(self, namespace: str) -> bool:
        """Is a session made in this namespace where none serves?"""
        return self.template is not None and self.template.allowed_in(namespace)


def catalogue_entries(value: object) -> tuple[CatalogueEntry, ...]:
    """Read the parsed catalogue.json. Raises InvalidCatalogue."""
    if not isinstance(value, list):
        raise InvalidCatalogue(f"{names.CATALOGUE_FIELD}: not a list")
    return tuple(_entry(item, f"{names.CATALOGUE_FIELD}[{index}]") for index, item in enumerate(value))


def canonical_name(base_model: str, catalogue: Iterable[CatalogueEntry]) -> str:
    """The name behind an alias; any other text is its own name."""
    return next((entry.name for entry in catalogue if base_model in entry.aliases), base_model)


def session_name(base_model: str, number: int) -> str:
    """Name of the number-th TrainingSession (from 1) that is made for a base model.

    Whoever makes one derives the same name, so two of them meet in AlreadyExists. The hash keeps base models apart
    that differ only in their organization, or in characters that a name cannot have.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", base_model.rpartition("/")[2].lower()).strip("-")
    parts = [readable[:_READABLE_LENGTH].strip("-"), hashlib.sha256(base_model.encode()).hexdigest()[:_HASH_LENGTH]]
    if number > 1:
        parts.append(str(number))
    return "-".join(part for part in parts if part)


def session_manifest(base_model: str, template: SessionTemplate, namespace: str, name: str) -> dict[str, Any]:
    """The TrainingSession that is made for a base model."""
    labels = {
        **(template.metadata.get("labels") or {}),
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_CREATED_BY: names.CREATED_BY_GATEWAY,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.TRAINING_SESSION_KIND,
        "metadata": {**template.metadata, "name": name, "namespace": namespace, "labels": labels},
        "spec": {**template.spec, "baseModel": {"name": base_model, "source": template.source}},
    }


def _entry(item: object, where: str) -> CatalogueEntry:
    if not isinstance(item, dict):
        raise InvalidCatalogue(f"{where}: not an object")
    name, tokenizer = item.get("name"), item.get("tokenizer_id") or None
    if not isinstance(name, str) or not name:
        raise InvalidCatalogue(f"{where}.name: a non-empty string is required")
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise InvalidCatalogue(f"{where}.tokenizer_id: a string is required")
    template = None if item.get("sessionTemplate") is None else _template(item, where)
    return CatalogueEntry(name, _texts(item, "aliases", where), tokenizer, template)


def _template(item: dict[str, Any], where: str) -> SessionTemplate:
    template = _object(item, "sessionTemplate", where)
    inside = f"{where}.sessionTemplate"
    metadata = _object({"metadata": {}, **template}, "metadata", inside)
    unknown = sorted((template.keys() - {"metadata", "spec"}) | (metadata.keys() - {"labels", "annotations"}))
    if unknown:
        raise InvalidCatalogue(f"{inside}: {', '.join(unknown)}: only metadata.labels, metadata.annotations and spec")
    spec = _object(template, "spec", inside)
    if "baseModel" in spec:
        raise InvalidCatalogue(f"{inside}.spec.baseModel: it follows from the entry's name and source")
    limit = item.get("limit", 1)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= GREATEST_LIMIT:
        raise InvalidCatalogue(f"{where}.limit: an integer from 1 to {GREATEST_LIMIT} is required")
    return SessionTemplate(_object(item, "source", where), metadata, spec, _texts(item, "namespaces", where), limit)


def _object(item: dict[str, Any], field: str, where: str) -> dict[str, Any]:
    found = item.get(field)
    if not isinstance(found, dict):
        raise InvalidCatalogue(f"{where}.{field}: an object is required")
    return found


def _texts(item: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    found = item.get(field) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InvalidCatalogue(f"{where}.{field}: a list of strings is required")
    return tuple(found)
