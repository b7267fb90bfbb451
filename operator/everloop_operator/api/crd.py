"""Generates the CRD files from the models: `python -m everloop_operator.api.crd [DIRECTORY]`.

Structural schemas know less than what pydantic writes, so everything is translated explicitly; a keyword that is not
known here is an error and never passed through.

Unknown fields are not refused by the schema: the API server prunes them, and names them in a warning, or in an error
when the client asks for strict validation (`kubectl apply` does by default).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from . import names
from .rl_job import RLJob
from .training_session import TrainingSession

COPIED = frozenset(
    {
        "type",
        "description",
        "enum",
        "format",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "required",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-validations",
    }
)
DROPPED = frozenset({"title", "propertyNames", "$defs"})
"""`propertyNames` does not exist in structural schemas: names of resources are checked when the pod is created."""

PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
    {"name": "Serving", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Serving")].status'},
    {"name": "Models", "type": "integer", "jsonPath": ".status.modelCount"},
    {
        "name": "Step",
        "type": "integer",
        "jsonPath": ".status.models[0].step",
        "description": "Optimizer steps of the most trained model",
    },
    {"name": "Node", "type": "string", "jsonPath": ".status.pod.node"},
    {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt"},
    {"name": "Recoveries", "type": "integer", "jsonPath": ".status.recoveryCount"},
    {"name": "Base model", "type": "string", "jsonPath": ".spec.baseModel.name", "priority": 1},
    {"name": "Checkpoint", "type": "string", "jsonPath": ".status.latestCheckpoint.name", "priority": 1},
    {
        "name": "Message",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].message',
        "priority": 1,
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)

JOB_PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
    {"name": "Iteration", "type": "integer", "jsonPath": ".status.progress.iteration"},
    {"name": "Reward", "type": "string", "jsonPath": ".status.progress.reward"},
    {"name": "Evaluation", "type": "string", "jsonPath": ".status.evaluation.value"},
    {
        "name": "ETA",
        "type": "integer",
        "jsonPath": ".status.progress.etaSeconds",
        "description": "Seconds until the limit of iterations, at the present pace",
    },
    {"name": "Session", "type": "string", "jsonPath": ".status.session.name", "priority": 1},
    {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt", "priority": 1},
    {"name": "Checkpoint", "type": "string", "jsonPath": ".status.latestCheckpoint.location", "priority": 1},
    {
        "name": "Message",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Ready")].message',
        "priority": 1,
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)


LINE = 160
"""A value that is no longer than this as JSON stands in one line of a file."""


class SchemaError(Exception):
    """A model uses something that a structural schema cannot say; the message names the place."""


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of a model.

    Raises:
        SchemaError: the model uses something without a translation.
    """
    document = model.model_json_schema(by_alias=True)
    return _translate(document, document.get("$defs", {}), model.__name__)


def _translate(node: Mapping[str, Any], definitions: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        own = {key: value for key, value in node.items() if key != "$ref"}
        node = _merge(target, own)
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        alternatives = [item for item in node["anyOf"] if item != {"type": "null"}]
        if len(alternatives) != 1 or len(node["anyOf"]) != 2:
            raise SchemaError(f"{where}: a union other than 'X or nothing'")
        own = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
        return _translate(_merge(alternatives[0], own), definitions, where)
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in COPIED:
            result[key] = " ".join(value.split()) if key == "description" else value
        elif key == "anyOf":
            result[key] = value
        elif key == "const":
            result["enum"] = [value]
        elif key == "properties":
            result[key] = {name: _translate(item, definitions, f"{where}.{name}") for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = _translate(value, definitions, f"{where}.{key}")
        elif key == "default":
            if not value and (node.get("type") == "array" or "additionalProperties" in node):
                continue  # an empty list or map is as good as none
            # The server fills nested defaults only where the parent is present: an empty parent is enough.
            result[key] = {} if node.get("type") == "object" else value
        elif key not in DROPPED:
            raise SchemaError(f"{where}: {key} has no translation")
    return result


def _merge(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """The field's own keywords win, but rules of type and field both hold."""
    merged = {**inner, **outer}
    both = [*inner.get("x-kubernetes-validations", []), *outer.get("x-kubernetes-validations", [])]
    if both:
        merged["x-kubernetes-validations"] = both
    return merged


def training_session_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of TrainingSession."""
    words = {
        "kind": names.TRAINING_SESSION_KIND,
        "plural": names.TRAINING_SESSION_PLURAL,
        "singular": names.TRAINING_SESSION_SINGULAR,
        "shortNames": [names.TRAINING_SESSION_SHORT],
    }
    return _definition(TrainingSession, words, PRINTER_COLUMNS)


def rl_job_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of RLJob."""
    words = {
        "kind": names.RL_JOB_KIND,
        "plural": names.RL_JOB_PLURAL,
        "singular": names.RL_JOB_SINGULAR,
        "shortNames": [names.RL_JOB_SHORT],
    }
    return _definition(RLJob, words, JOB_PRINTER_COLUMNS)


def _definition(
    model: type[BaseModel], words: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    schema = structural(model)
    schema["properties"]["status"].pop("default")
    schema["properties"] = {
        "apiVersion": {"type": "string", "description": "Version of the schema: everloop.dev/v1alpha1."},
        "kind": {"type": "string", "description": f"{words['kind']}."},
        "metadata": {"type": "object"},
        **schema["properties"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{words['plural']}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": words["kind"],
                "listKind": f"{words['kind']}List",
                "plural": words["plural"],
                "singular": words["singular"],
                "shortNames": words["shortNames"],
                "categories": ["all", names.CATEGORY],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(columns),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def render(document: Mapping[str, Any]) -> str:
    """The document as YAML with a header.

    Strings, and everything that fits into a line, are as in JSON, which is YAML too: so no YAML writer is needed, and
    more than half of a file is not indentation.
    """
    header = "# Generated from operator/everloop_operator/api by `python -m everloop_operator.api.crd`. Do not edit.\n"
    return header + "\n".join(_lines(document, 0)) + "\n"


def _lines(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)
            text = json.dumps(item)
            if isinstance(item, Mapping | list) and len(text) > LINE:
                lines += [f"{pad}{name}:", *_lines(item, depth + 1)]
            else:
                lines.append(f"{pad}{name}: {text}")
    else:
        for item in value:
            text = json.dumps(item)
            if isinstance(item, Mapping) and len(text) > LINE:
                first, *rest = _lines(item, depth + 1)
                lines += [f"{pad}- {first.lstrip()}", *rest]
            else:
                lines.append(f"{pad}- {text}")
    return lines


def files() -> dict[str, str]:
    """File name -> content of every CRD."""
    return {
        f"{names.GROUP}_{names.RL_JOB_PLURAL}.yaml": render(rl_job_crd()),
        f"{names.GROUP}_{names.TRAINING_SESSION_PLURAL}.yaml": render(training_session_crd()),
    }


def main(arguments: list[str]) -> int:
    """Writes every CRD file into the directory named, by default `crds`."""
    directory = Path(arguments[0]) if arguments else Path("crds")
    for name, content in files().items():
        (directory / name).write_text(content, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
