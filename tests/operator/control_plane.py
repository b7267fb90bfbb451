"""A real API server with its etcd, and nothing else: no scheduler, no controllers, no nodes. The tests play those."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.prepared import kube_binary
from tests.wall_clock import WallClock

ADMIN_TOKEN = "admin-token"
START_SECONDS = 60.0
VALID_DAYS = 5000


class StartFailed(Exception):
    """The API server did not come up; the message holds the end of its log."""


@dataclass(frozen=True)
class ControlPlane:
    """Address and credentials of a running API server."""

    server: str
    ca_file: Path
    kube: Path
    directory: Path
    etcd: str = ""
    """Where its store takes calls."""

    @property
    def audit_log(self) -> Path:
        """One line of JSON for each call that was answered; only where it was asked for."""
        return self.directory / "audit.log"

    def write_kubeconfig(self, path: Path, token: str = ADMIN_TOKEN) -> Path:
        """A kubeconfig for the user with this token."""
        path.write_text(
            f"""
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{self.server}", certificate-authority: "{self.ca_file}"}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
        )
        path.chmod(0o600)
        return path


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


@contextmanager
def running(directory: Path, extra_tokens: tuple[str, ...] = (), *, audit: bool = False) -> Iterator[ControlPlane]:
    """Starts etcd and kube-apiserver below `directory` and stops them again.

    `extra_tokens` are lines `token,user,uid` for further users, who have only the rights that RBAC gives them.
    `audit` has every call logged, without its body.
    """
    kube = kube_binary()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        (directory / name).symlink_to(kube)
    pki = directory / "pki"
    pki.mkdir()
    subprocess.run(["openssl", "genrsa", "-out", pki / "sa.key", "2048"], check=True, capture_output=True)
    public: list[str | Path] = ["openssl", "rsa", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub"]
    subprocess.run(public, check=True, capture_output=True)
    _write_certificate(pki)
    tokens = [f'{ADMIN_TOKEN},admin,1,"system:masters"', *extra_tokens]
    (directory / "tokens.csv").write_text("\n".join(tokens) + "\n")
    port, client, peer = free_ports(3)
    etcd_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    etcd = [
        *("--data-dir", directory / "data", "--unsafe-no-fsync", "--log-level", "error"),
        *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url),
        *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"default={peer_url}"),
    ]
    apiserver = [
        *("--etcd-servers", etcd_url, "--bind-address", "127.0.0.1", "--secure-port", str(port), "--cert-dir", pki),
        *("--service-account-key-file", pki / "sa.pub", "--service-account-signing-key-file", pki / "sa.key"),
        *("--service-account-issuer", "https://kubernetes.default.svc"),
        *("--service-cluster-ip-range", "10.96.0.0/16", "--token-auth-file", directory / "tokens.csv"),
        *("--authorization-mode", "RBAC", "--endpoint-reconciler-type", "none"),
        # Nobody makes the default service account of a namespace here.
        *("--disable-admission-plugins", "ServiceAccount"),
    ]
    if audit:
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
        (directory / "audit.json").write_text(json.dumps({**policy, "omitStages": ["RequestReceived"]}))
        apiserver += ["--audit-policy-file", directory / "audit.json", "--audit-log-path", directory / "audit.log"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments in (("etcd", etcd), ("kube-apiserver", apiserver)):
            with (directory / f"{name}.log").open("wb") as log:
                command = [str(directory / name), *map(str, arguments)]
                started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=directory))
        plane = ControlPlane(f"https://127.0.0.1:{port}", pki / "apiserver.crt", kube, directory, etcd_url)
        _wait_ready(plane, started)
        yield plane
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write_certificate(pki: Path) -> None:
    """One that is valid for years before and after now, for clients whose clocks are wrong."""
    clock = WallClock(pki)
    clock.jump(-VALID_DAYS)
    command: list[str | Path] = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=apiserver"]
    command += ["-days", str(2 * VALID_DAYS), "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", pki / "apiserver.key", "-out", pki / "apiserver.crt"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **clock.environment})


def _wait_ready(plane: ControlPlane, started: list[subprocess.Popen[bytes]]) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and all(process.poll() is None for process in started):
        if plane.ca_file.exists():
            try:
                with httpx.Client(verify=False, trust_env=False) as client:  # the certificate may still be half written
                    answer = client.get(
                        f"{plane.server}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}, timeout=2
                    )
                if answer.text == "ok":
                    return
            except httpx.HTTPError:
                pass
        time.sleep(0.1)
    tail = (plane.directory / "kube-apiserver.log").read_text()[-2000:]
    raise StartFailed(f"the API server did not start:\n{tail}")
