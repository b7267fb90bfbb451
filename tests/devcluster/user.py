"""What a user of a cluster does: applies, waits, asks."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from devcluster.cluster import Cluster


class User:
    """A user of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "--output=json"))
        return value

    def run(self, pod: dict[str, Any]) -> str:
        """Create a pod, wait until it is Ready and return its address."""
        name = pod["metadata"]["name"]
        self.apply(pod)
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=30s")
        return str(self.get("pod", name)["status"]["podIP"])

    def result(self, pod: dict[str, Any]) -> str:
        """Run a pod to its end and return what it wrote; it must succeed."""
        name = pod["metadata"]["name"]
        self.apply(pod)
        wait_for(lambda: self.get("pod", name)["status"]["phase"] in ("Succeeded", "Failed"), f"{name} to end")
        text = self.kubectl("logs", name)
        assert self.get("pod", name)["status"]["phase"] == "Succeeded", text
        return text


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Return once a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def fetch(address: str, path: str = "/hostname") -> str:
    """Return what a server answers."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def answers(address: str) -> bool:
    """Whether a server answers now."""
    try:
        fetch(address)
    except OSError:
        return False
    return True
