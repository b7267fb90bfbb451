"""Advertises pretend GPUs to a kubelet through the device plugin API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import deviceplugin_pb2 as pb  # type: ignore[import-not-found]
import deviceplugin_pb2_grpc as rpc  # type: ignore[import-not-found]
import grpc

RESOURCE = "nvidia.com/gpu"
SOCKET = "devcluster-gpu.sock"
POLL_SECONDS = 0.5


class Plugin(rpc.DevicePluginServicer):  # type: ignore[misc]
    """So many healthy GPUs."""

    def __init__(self, count: int) -> None:
        self._devices = [pb.Device(ID=str(i), health="Healthy") for i in range(count)]

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """No options."""
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the devices once; the stream stays open for as long as the plugin lives."""
        yield pb.ListAndWatchResponse(devices=self._devices)
        await asyncio.Event().wait()

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Give a container its devices, as the environment variables that CUDA reads."""
        answers = []
        for wanted in request.container_requests:
            ids = ",".join(sorted(wanted.devices_ids, key=int))
            envs = {"NVIDIA_VISIBLE_DEVICES": ids, "CUDA_VISIBLE_DEVICES": ids}
            answers.append(pb.ContainerAllocateResponse(envs=envs))
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Nothing to prepare."""
        return pb.PreStartContainerResponse()


async def serve(directory: Path, count: int) -> None:
    """Serve `count` GPUs in the kubelet's `directory`; register, and again whenever the kubelet has come anew."""
    kubelet, socket = directory / "kubelet.sock", directory / SOCKET
    server = registered = None
    while True:
        # A starting kubelet empties the directory and makes its socket anew.
        inode = kubelet.stat().st_ino if kubelet.exists() else None
        if inode and (inode != registered or not socket.exists()):
            if server:
                await server.stop(0)
            socket.unlink(missing_ok=True)
            server = grpc.aio.server()
            rpc.add_DevicePluginServicer_to_server(Plugin(count), server)
            server.add_insecure_port(f"unix://{socket}")
            await server.start()
            request = pb.RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE)
            try:
                async with grpc.aio.insecure_channel(f"unix://{kubelet}") as channel:
                    await rpc.RegistrationStub(channel).Register(request, timeout=5)
                registered = inode
            except grpc.RpcError:
                pass  # not listening yet: the next round tries again
        await asyncio.sleep(POLL_SECONDS)
