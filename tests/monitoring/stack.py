"""A real API server, operator, gateway and Prometheus, each a process of its own."""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from everloop_operator.api import names
from monitoring.__main__ import CHART
from tests.gateway.world import Processes
from tests.operator.conftest import installed_api
from tests.operator.control_plane import running
from tests.operator.world import RELEASE, ROOT, Api, Operator, World, eventually, free_address
from tests.prepared import prometheus

RULE = {"name": "xid", "kind": "Label", "key": "example.com/xid", "severity": "MoveNow", "debounceSeconds": 0}


@dataclass
class Stack:
    """What a test speaks to."""

    world: World
    gateway: str
    prometheus: httpx.Client

    def ask(self, path: str, **parameters: str) -> Any:
        """What Prometheus' HTTP API answers."""
        answer = self.prometheus.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def values(self, expression: str, labels: dict[str, str]) -> list[float]:
        """The values of the series of an expression that have these labels; those without a number left out."""
        found = self.ask("query", query=expression)["result"]
        values = [float(item["value"][1]) for item in found if labels.items() <= item["metric"].items()]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def started(directory: Path) -> Iterator[Stack]:
    """Everything, with Prometheus having read both targets."""
    with ExitStack() as stack:
        plane = stack.enter_context(running(directory))
        kubeconfig = plane.write_kubeconfig(directory / "admin.kubeconfig")
        api = stack.enter_context(installed_api(plane))
        api.create("/api/v1/namespaces", {"metadata": {"name": RELEASE}})
        rules = directory / "rules.json"
        rules.write_text(json.dumps([RULE]))
        addresses = [free_address(number) for number in (11, 12, 13)]
        settings = {"EVERLOOP_METRICS": "true", "EVERLOOP_NODE_RULES": str(rules)}
        operator = Operator(kubeconfig, directory / "operator.log", addresses[0], **settings)
        operator.start()
        stack.callback(operator.stop)
        processes = Processes()
        stack.callback(processes.stop)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'trainer_image'}",
            "KUBECONFIG": str(kubeconfig),
            "EVERLOOP_RELEASE_NAMESPACE": RELEASE,
            "EVERLOOP_METRICS": "true",
            "POD_IP": addresses[1],
        }
        catalogue = {"metadata": {"name": names.CATALOGUE_CONFIG_MAP}, "data": {names.CATALOGUE_FIELD: "[]"}}
        api.create(f"/api/v1/namespaces/{RELEASE}/configmaps", catalogue)
        processes.start([sys.executable, "-m", "everloop_gateway"], environment, directory / "gateway.log")
        world = World(api, "team-seen", 9)
        stack.callback(world.close)
        world.claims()
        client = httpx.Client(base_url=f"http://{addresses[2]}:9090", trust_env=False, timeout=30.0)
        stack.callback(client.close)
        seen = Stack(world, f"http://{addresses[1]}:{names.GATEWAY_PORT}", client)
        processes.start(_command(directory, api, addresses), dict(os.environ), directory / "prometheus.log")
        eventually("both targets read", lambda: _up(seen) == ["up", "up"], 60)
        yield seen


def _command(directory: Path, api: Api, addresses: list[str]) -> list[str]:
    path = f"/api/v1/namespaces/{RELEASE}/secrets/{names.METRICS_SECRET}"
    secret = eventually("the token of the metrics", lambda: api.get(path))
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CHART / "alerts.json")],
        "scrape_configs": [
            {
                "job_name": "everloop",
                "honor_labels": True,
                "authorization": {"credentials": base64.b64decode(secret["data"][names.TOKEN_FIELD]).decode()},
                "static_configs": [{"targets": [f"{ip}:{names.METRICS_PORT}" for ip in addresses[:2]]}],
            }
        ],
    }
    file = directory / "prometheus.json"
    file.write_text(json.dumps(configuration))
    options = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    return [str(prometheus()), *options, f"--web.listen-address={addresses[2]}:9090"]


def _up(stack: Stack) -> list[str]:
    try:
        answer = stack.prometheus.get("/api/v1/targets")
    except httpx.HTTPError:
        return []
    # It listens before it serves.
    return [target["health"] for target in answer.json()["data"]["activeTargets"]] if answer.is_success else []
