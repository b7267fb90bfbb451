"""Serves the container runtime of one node: ``python -m devcluster.cri CONFIG.json``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import cri_pb2_grpc as rpc  # type: ignore[import-not-found]
import grpc

from devcluster.cri import deviceplugin
from devcluster.cri.config import Config
from devcluster.cri.images import Images
from devcluster.cri.imageservice import ImageService
from devcluster.cri.runtime import Runtime


async def serve(config: Config) -> None:
    """Serve until the process is killed."""
    images = Images(config.images)
    runtime = Runtime(config, images)
    server = grpc.aio.server()
    rpc.add_RuntimeServiceServicer_to_server(runtime, server)
    rpc.add_ImageServiceServicer_to_server(ImageService(images, config.directory, runtime.image_names()), server)
    socket = config.directory / "cri.sock"
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    if config.gpus:
        await deviceplugin.serve(config.device_plugins, config.gpus)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Config.from_json(Path(sys.argv[1]).read_text())))
