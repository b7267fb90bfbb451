"""The environment -> one value, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class SettingsError(Exception):
    """A variable is missing or unusable; the message names it."""


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """What the installation tells the operator."""

    release_namespace: str
    trainer_image: str
    gateway_endpoint: str
    pod_ip: str
    node_lost_seconds: float
    """How long a node may be not Ready before its pods are replaced."""


def read(environment: Mapping[str, str]) -> OperatorSettings:
    """Raises SettingsError."""
    return OperatorSettings(
        release_namespace=_required(environment, "EVERLOOP_RELEASE_NAMESPACE"),
        trainer_image=_required(environment, "EVERLOOP_TRAINER_IMAGE"),
        gateway_endpoint=environment.get("EVERLOOP_GATEWAY_ENDPOINT", ""),
        pod_ip=_required(environment, "POD_IP"),
        node_lost_seconds=_seconds(environment, "EVERLOOP_NODE_LOST_SECONDS", 2.0),
    )


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"{name} is not a number") from None
    if not 0 <= value <= 3600:
        raise SettingsError(f"{name} must be between 0 and 3600 seconds")
    return value
