"""What the gateway is told by its environment."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass


class InvalidSettings(ValueError):
    """A variable is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to listen and what to follow."""

    pod_ip: str
    release_namespace: str
    namespaces: tuple[str, ...]
    """Namespaces whose TrainingSessions are served; empty = all."""
    log_level: str
    metrics: bool
    """Whether there is a metrics port."""
    batched_polls: bool = False
    """Whether clients are told to wait for all samples of a sampling session with one call."""
    stand_ins: bool = False
    """Whether a loss that is not published is replaced by what stands in for it."""


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read POD_IP and the variables EVERLOOP_RELEASE_NAMESPACE, _NAMESPACES, _LOG_LEVEL, _METRICS, _BATCHED_POLLS and
    _STAND_INS.

    Raises InvalidSettings.
    """
    for name in ("POD_IP", "EVERLOOP_RELEASE_NAMESPACE"):
        if not environment.get(name):
            raise InvalidSettings(f"{name}: required")
    try:
        address = ipaddress.ip_address(environment["POD_IP"])
    except ValueError:
        raise InvalidSettings("POD_IP: not an IP address") from None
    if address.is_unspecified:
        raise InvalidSettings("POD_IP: the gateway listens on its own address only, not on all")
    level = environment.get("EVERLOOP_LOG_LEVEL", "INFO").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise InvalidSettings("EVERLOOP_LOG_LEVEL: one of DEBUG, INFO, WARNING, ERROR")
    listed = (item.strip() for item in environment.get("EVERLOOP_NAMESPACES", "").split(","))
    return Settings(
        str(address),
        environment["EVERLOOP_RELEASE_NAMESPACE"],
        tuple(item for item in listed if item),
        level,
        metrics=_switch(environment, "EVERLOOP_METRICS"),
        batched_polls=_switch(environment, "EVERLOOP_BATCHED_POLLS"),
        stand_ins=_switch(environment, "EVERLOOP_STAND_INS"),
    )


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name) or "false"
    if value not in ("true", "false"):
        raise InvalidSettings(f"{name}: true or false")
    return value == "true"
