"""The restricted Pod Security Standard, restated from its documentation: what it finds wrong with a pod.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
}


def violations(pod: dict[str, Any]) -> list[str]:
    """Everything for which a namespace that enforces the standard would refuse the pod."""
    spec = pod["spec"]
    return [
        *_pod(pod["metadata"], spec),
        *(f"{at}: {what}" for at, c in _containers(spec) for what in _container(c, spec)),
    ]


def _containers(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            yield f"{kind}.{container['name']}", container


def _pod(metadata: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"volume {volume}"
    for key, value in metadata.get("annotations", {}).items():
        unconfined = value not in ("", "runtime/default") and not value.startswith("localhost/")
        if unconfined and key.startswith("container.apparmor.security.beta.kubernetes.io/"):
            yield f"annotation {key}"
    for sysctl in spec.get("securityContext", {}).get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"


def _container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    own, shared = container.get("securityContext", {}), spec.get("securityContext", {})
    effective = {**shared, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in own.get("capabilities", {}).get("drop", ()):
        yield "capabilities are not dropped"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if effective.get("runAsNonRoot") is not True or own.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if 0 in (shared.get("runAsUser"), own.get("runAsUser")):
        yield "runAsUser"
    if effective.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "seccompProfile"
    if effective.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield "appArmorProfile"
    for context in (shared, own):
        options = context.get("seLinuxOptions", {})
        if options.get("type", "") not in SELINUX_TYPES or options.get("user") or options.get("role"):
            yield "seLinuxOptions"
        if context.get("windowsOptions", {}).get("hostProcess"):
            yield "hostProcess"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for kind in ("httpGet", "tcpSocket"):
            if container.get(probe, {}).get(kind, {}).get("host"):
                yield f"{probe} host"
