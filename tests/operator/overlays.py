"""Overlays at random: whatever the CRD's schema lets through, with fields in it that no schema should let through."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from tests.operator.full import Schema, schema

INTRUDERS: dict[str, Any] = {
    "hostNetwork": True,
    "hostPID": True,
    "hostIPC": True,
    "hostPath": {"path": "/"},
    "privileged": True,
    "allowPrivilegeEscalation": True,
    "runAsNonRoot": False,
    "runAsUser": 0,
    "procMount": "Unmasked",
    "capabilities": {"add": ["SYS_ADMIN"]},
    "seccompProfile": {"type": "Unconfined"},
    "appArmorProfile": {"type": "Unconfined"},
    "seLinuxOptions": {"user": "root"},
    "sysctls": [{"name": "kernel.msgmax", "value": "1"}],
    "ports": [{"containerPort": 1, "hostPort": 1}],
    "securityContext": {"privileged": True, "runAsUser": 0},
    "containers": [{"name": "own", "image": "own"}],
    "ephemeralContainers": [{"name": "own", "image": "own"}],
    "nodeName": "node-a",
    "restartPolicy": "Never",
}
"""Fields of pods, containers, volumes and security contexts that break the restricted standard, or the operator."""

WORDS = (
    *("", "a", "b1", "x-y", "Upper", "two words", "a.b", "dir/file", "/dev/shm", "/data", "/etc/ssl", "/models", "FOO"),
    *("EVERLOOP_CONFIG", "POD_IP", "LD_PRELOAD", "journal", "token", "tmp", "trainer", "metadata.name"),
)
"""Strings of all kinds: a field gets those that its schema lets through."""
KEYS = st.sampled_from(["a", "team", "Upper", "example.com/why", "kubernetes.io/arch", "seccomp.example.com/pod"])


def overlays(intruders: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Values of `spec.pod`."""
    result: st.SearchStrategy[dict[str, Any]] = _strategy(
        schema()["properties"]["spec"]["properties"]["pod"], intruders
    )
    return result


def _strategy(node: Schema, intruders: bool) -> st.SearchStrategy[Any]:
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return st.integers(0, 9) | st.sampled_from(["500m", "1Gi", "2"])
    kind = node["type"]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(node["minimum"], node["maximum"])
    if kind == "string":
        return _text(node)
    if kind == "array":
        return _list(node, intruders)
    return _object(node, intruders)


def _text(node: Schema) -> st.SearchStrategy[str]:
    least, most, pattern = node.get("minLength", 0), node["maxLength"], node.get("pattern", "")
    return st.sampled_from([text for text in WORDS if least <= len(text) <= most and re.search(pattern, text)])


def _list(node: Schema, intruders: bool) -> st.SearchStrategy[list[Any]]:
    keys = node.get("x-kubernetes-list-map-keys")
    unique = (lambda item: item[keys[0]]) if keys else None
    return st.lists(_strategy(node["items"], intruders), min_size=node.get("minItems", 0), max_size=2, unique_by=unique)


def _object(node: Schema, intruders: bool) -> st.SearchStrategy[dict[str, Any]]:
    if "additionalProperties" in node:
        return st.dictionaries(KEYS, _strategy(node["additionalProperties"], intruders), max_size=2)
    fields = {name: _strategy(child, intruders) for name, child in node["properties"].items()}
    required = node.get("required", ())
    known = st.fixed_dictionaries(
        {name: strategy for name, strategy in fields.items() if name in required},
        optional={name: strategy for name, strategy in fields.items() if name not in required},
    )
    if not intruders:
        return known
    # A field that the schema knows keeps its meaning: only unknown ones are smuggled in.
    unknown = {name: st.just(value) for name, value in INTRUDERS.items() if name not in fields}
    return st.builds(lambda ours, theirs: {**theirs, **ours}, known, st.fixed_dictionaries({}, optional=unknown))
