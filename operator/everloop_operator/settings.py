"""The environment -> one value, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from everloop_operator.core import node_rules
from everloop_operator.core.node_rules import NodeRule
from everloop_operator.loop.scope import Scope


class SettingsError(Exception):
    """A variable is missing or unusable; the message names it."""


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """What the installation tells the operator."""

    release_namespace: str
    operator_image: str
    """The image of this process, which holds the progress reader of driver pods too."""
    trainer_image: str
    gateway_endpoint: str
    pod_ip: str
    node_lost_seconds: float
    """How long a node may be not Ready before its pods are replaced."""
    node_rules: tuple[NodeRule, ...]
    """What else makes a node unfit."""
    scope: Scope
    """What of the cluster it may see."""
    fleet_cap: float
    """Share of the nodes with session pods that may be left at a time for their health, 0 to 1."""
    metrics: bool
    """Whether there is a metrics port."""


def read(environment: Mapping[str, str]) -> OperatorSettings:
    """Raises SettingsError."""
    return OperatorSettings(
        release_namespace=_required(environment, "EVERLOOP_RELEASE_NAMESPACE"),
        operator_image=_required(environment, "EVERLOOP_OPERATOR_IMAGE"),
        trainer_image=_required(environment, "EVERLOOP_TRAINER_IMAGE"),
        gateway_endpoint=environment.get("EVERLOOP_GATEWAY_ENDPOINT", ""),
        pod_ip=_required(environment, "POD_IP"),
        node_lost_seconds=_number(environment, "EVERLOOP_NODE_LOST_SECONDS", 2.0, 3600.0),
        node_rules=_rules(environment),
        scope=Scope(_words(environment, "EVERLOOP_NAMESPACES"), _truth(environment, "EVERLOOP_WATCH_NODES", "true")),
        fleet_cap=_number(environment, "EVERLOOP_FLEET_CAP_PERCENT", 20.0, 100.0) / 100,
        metrics=_truth(environment, "EVERLOOP_METRICS", "false"),
    )


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    listed = (item.strip() for item in environment.get(name, "").split(","))
    return tuple(item for item in listed if item)


def _truth(environment: Mapping[str, str], name: str, default: str) -> bool:
    text = environment.get(name) or default
    if text not in ("true", "false"):
        raise SettingsError(f"{name} must be true or false")
    return text == "true"


def _rules(environment: Mapping[str, str]) -> tuple[NodeRule, ...]:
    path = environment.get("EVERLOOP_NODE_RULES", "")
    if not path:
        return ()
    try:
        return node_rules.parse(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(f"EVERLOOP_NODE_RULES: {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"nodeHealth: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _number(environment: Mapping[str, str], name: str, default: float, most: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"{name} is not a number") from None
    if not 0 <= value <= most:
        raise SettingsError(f"{name} must be between 0 and {most:g}")
    return value
