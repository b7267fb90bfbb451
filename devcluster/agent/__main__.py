"""Runs beside the control plane: ``python -m devcluster.agent ROOT``."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from devcluster.agent.endpoints import named_services, routes
from devcluster.agent.nodes import initialize
from devcluster.agent.proxy import Proxy
from devcluster.api import ApiClient, ApiError
from devcluster.settings import Layout, write_private

RETRY_SECONDS = 0.3

Objects = dict[str, dict[str, Any]]


def follow_forever(api: ApiClient, path: str, act: Callable[[Objects], None]) -> NoReturn:
    """Call `act` with all objects of a collection after every change, through restarts of the API server."""
    while True:
        try:
            for objects in api.follow(path):
                act(objects)
        except (OSError, http.client.HTTPException, ApiError, json.JSONDecodeError) as e:
            print(f"{path}: {e}", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)


async def run(layout: Layout) -> None:
    """Keep node addresses, the proxy and the list of Services as the API server's objects say."""
    api, proxy, loop = ApiClient(layout.kubeconfig), Proxy(), asyncio.get_running_loop()
    api_server = ("127.0.0.1", layout.read().ports["kube-apiserver"])
    seen: dict[str, Objects] = {}
    changed = asyncio.Event()

    def initialize_nodes(objects: Objects) -> None:
        initialize(api, objects, layout.read().nodes)

    def note(kind: str) -> Callable[[Objects], None]:
        def record(objects: Objects) -> None:
            loop.call_soon_threadsafe(take, kind, dict(objects))

        return record

    def take(kind: str, objects: Objects) -> None:
        seen[kind] = objects
        changed.set()

    collections = {
        "/api/v1/nodes": initialize_nodes,
        "/api/v1/services": note("services"),
        "/api/v1/pods": note("pods"),
    }
    for path, act in collections.items():
        threading.Thread(target=follow_forever, args=(api, path, act), daemon=True).start()
    while True:
        await changed.wait()
        changed.clear()
        services = seen.get("services", {})
        write_private(layout.services, json.dumps(named_services(services)))
        await proxy.set_routes(routes(services, seen.get("pods", {}), api_server))


if __name__ == "__main__":
    asyncio.run(run(Layout(Path(sys.argv[1]))))
