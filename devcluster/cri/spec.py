"""What the shim gets to run a container: a plain value made from the kubelet's request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cri_pb2 as pb  # type: ignore[import-not-found]

from devcluster.cri.images import Image

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLUSTER_DOMAIN = "cluster.local"
HOSTS = "/etc/hosts"


def container_spec(
    config: Any, sandbox: Any, image: Image, *, forced_env: dict[str, str], hidden: Sequence[str]
) -> dict[str, Any]:
    """Return the value of a container's spec.json, but for the hosts file.

    Args:
        config: the CRI's ContainerConfig.
        sandbox: the CRI's PodSandboxConfig.
        image: what is configured for the container's image.
        forced_env: environment that nothing else overrides.
        hidden: directories that the container must not see, except through its volumes.

    Raises:
        ValueError: there is no command to run.
    """
    command = list(config.command) or image.entrypoint
    args = list(config.args) or ([] if config.command else image.cmd)
    if not command + args:
        raise ValueError("no command specified")
    security = config.linux.security_context
    uid = security.run_as_user.value if security.HasField("run_as_user") else image.uid
    env = {"PATH": ":".join([*image.path, DEFAULT_PATH]), "HOME": "/" if uid else "/root"}
    env |= {"HOSTNAME": sandbox.hostname} | image.env
    env |= {e.key: e.value.decode() for e in config.envs}
    host_network = sandbox.linux.security_context.namespace_options.network == pb.NODE
    return {
        "argv": command + args,
        "env": env | forced_env,
        "cwd": config.working_dir or image.cwd,
        "uid": uid,
        "gid": security.run_as_group.value if security.HasField("run_as_group") else 0,
        "groups": list(security.supplemental_groups),
        "hostname": sandbox.hostname,
        "pid_namespace": security.namespace_options.pid != pb.NODE,
        "readonly_rootfs": security.readonly_rootfs,
        "mounts": [{"source": m.host_path, "target": m.container_path, "readonly": m.readonly} for m in config.mounts],
        "files": {} if host_network else _files(sandbox),
        "hidden": list(hidden),
        "log": str(Path(sandbox.log_directory) / config.log_path),
    }


def _files(sandbox: Any) -> dict[str, str]:
    files = {"/etc/hostname": sandbox.hostname + "\n"}
    dns = sandbox.dns_config
    if dns.servers:
        lines = [f"nameserver {server}" for server in dns.servers]
        lines += [f"search {' '.join(dns.searches)}"] if dns.searches else []
        lines += [f"options {' '.join(dns.options)}"] if dns.options else []
        files["/etc/resolv.conf"] = "\n".join(lines) + "\n"
    return files


def hosts_lines(services: Sequence[dict[str, str]], namespace: str) -> str:
    """Return lines of a hosts file that name Services, in place of the cluster DNS that is not there.

    Args:
        services: name, namespace and ip of every Service that has an address.
        namespace: the pod's, whose Services have short names too.
    """
    lines = []
    for service in services:
        full = f"{service['name']}.{service['namespace']}"
        names = [f"{full}.svc.{CLUSTER_DOMAIN}", f"{full}.svc", full]
        names += [service["name"]] if service["namespace"] == namespace else []
        lines.append(f"{service['ip']}\t{' '.join(names)}\n")
    return "".join(lines)
