"""The CRI's runtime service: sandboxes and the life of containers; see `lookup` for what it can be asked."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cri_pb2 as pb  # type: ignore[import-not-found]
import cri_pb2_grpc as rpc  # type: ignore[import-not-found]
import grpc

from devcluster.cri.config import Config
from devcluster.cri.images import Images
from devcluster.cri.lookup import Lookup
from devcluster.cri.spec import HOSTS, container_spec, hosts_lines
from devcluster.cri.state import Container, Sandbox, create, load, read_json, replace_json

SHIM = [sys.executable, "-I", "-S", str(Path(__file__).resolve().parents[1] / "shim" / "__main__.py")]
MAX_EXEC_OUTPUT = 16 << 20  # bytes; the kubelet's client refuses longer messages
POLL_SECONDS = 0.02


class Runtime(Lookup):
    """Sandboxes and containers of one node."""

    def __init__(self, config: Config, images: Images) -> None:
        super().__init__()
        self._config = config
        self._images = images
        self._sandbox_directory = config.directory / "sandboxes"
        self._container_directory = config.directory / "containers"
        for directory in load(self._sandbox_directory):
            self.sandboxes[directory.name] = Sandbox(directory)
        for directory in load(self._container_directory):
            self.containers[directory.name] = Container(directory)
        self._last_ip = 0

    def image_names(self) -> set[str]:
        """Return the images of all containers there are."""
        return {c.config.image.image for c in self.containers.values()}

    def boot_id(self) -> str:
        """Return what changes when the node loses its power; older sandboxes are dead then."""
        return self._config.boot_id.read_text()

    def _allocate_ip(self) -> str:
        used = {s.facts["ip"] for s in self.sandboxes.values() if s.facts["ready"]}
        while True:
            self._last_ip = self._last_ip % 60000 + 1
            ip = f"{self._config.prefix}.{self._last_ip // 250}.{self._last_ip % 250 + 2}"
            if ip not in used:
                return ip

    # --- sandboxes: an address, no process ---

    async def RunPodSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Give a pod its address."""
        metadata = request.config.metadata
        host_network = request.config.linux.security_context.namespace_options.network == pb.NODE
        facts = {
            "created_at": time.time_ns(),
            "ip": "" if host_network else self._allocate_ip(),
            "ready": True,
            "boot": self.boot_id(),
            "pod": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
        }
        sandbox = Sandbox(create(self._sandbox_directory, request, facts))
        self.sandboxes[sandbox.id] = sandbox
        return pb.RunPodSandboxResponse(pod_sandbox_id=sandbox.id)

    async def StopPodSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        """End whatever still runs in a pod."""
        sandbox = self.sandboxes.get(request.pod_sandbox_id)
        if sandbox:
            for container in self._containers_of(sandbox):
                await self._stop(container, 0)
            sandbox.stop()
        return pb.StopPodSandboxResponse()

    async def RemovePodSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Remove a pod with all its containers."""
        sandbox = self.sandboxes.get(request.pod_sandbox_id)
        if sandbox:
            for container in self._containers_of(sandbox):
                await self._remove(container)
            self.sandboxes.pop(sandbox.id, None)
            shutil.rmtree(sandbox.dir, ignore_errors=True)
        return pb.RemovePodSandboxResponse()

    def _containers_of(self, sandbox: Sandbox) -> list[Container]:
        return [c for c in self.containers.values() if c.sandbox_id == sandbox.id]

    # --- containers ---

    async def CreateContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Record what is to be run."""
        sandbox = await self.sandbox(request.pod_sandbox_id, context)
        config = request.config
        image = self._images[config.image.user_specified_image or config.image.image]
        hidden = [str(self._config.root)]
        try:
            spec = container_spec(config, sandbox.config, image, forced_env=self._config.env, hidden=hidden)
        except ValueError as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        facts = {"created_at": time.time_ns(), "sandbox": sandbox.id, "name": config.metadata.name}
        directory = create(self._container_directory, request, facts)
        replace_json(directory / "spec.json", spec)
        container = Container(directory)
        self.containers[container.id] = container
        return pb.CreateContainerResponse(container_id=container.id)

    async def StartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Start a container and wait until its program runs."""
        container = await self.container(request.container_id, context)
        self._write_hosts(container)
        shim = await asyncio.create_subprocess_exec(
            *SHIM, "run", str(container.dir), stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        _, error = await shim.communicate()
        container.refresh()
        if shim.returncode != 0:
            await context.abort(grpc.StatusCode.UNKNOWN, error.decode().strip())
        return pb.StartContainerResponse()

    def _write_hosts(self, container: Container) -> None:
        """Add the names of the Services there are now to the hosts file that the kubelet made."""
        source = next((m["source"] for m in container.spec["mounts"] if m["target"] == HOSTS), None)
        sandbox = self.sandboxes[container.sandbox_id]
        if source and not sandbox.host_network:
            lines = hosts_lines(read_json(self._config.services) or [], sandbox.config.metadata.namespace)
            container.spec["files"][HOSTS] = Path(source).read_text() + lines
            replace_json(container.dir / "spec.json", container.spec)

    async def _stop(self, container: Container, timeout: float) -> None:
        number = signal.SIGTERM
        if container.config.stop_signal:
            number = signal.Signals[pb.Signal.Name(container.config.stop_signal)]
        deadline = time.monotonic() + timeout
        if timeout > 0 and container.running:
            container.kill(number)
            while container.running and time.monotonic() < deadline:  # noqa: ASYNC110  a file says so
                await asyncio.sleep(POLL_SECONDS)
        while container.running:
            container.kill(signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)

    async def StopContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """End a container, at first politely."""
        if request.container_id in self.containers:
            await self._stop(self.containers[request.container_id], request.timeout)
        return pb.StopContainerResponse()

    async def _remove(self, container: Container) -> None:
        await self._stop(container, 0)
        self.containers.pop(container.id, None)
        shutil.rmtree(container.dir, ignore_errors=True)

    async def RemoveContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """End a container and forget it."""
        if request.container_id in self.containers:
            await self._remove(self.containers[request.container_id])
        return pb.RemoveContainerResponse()

    async def UpdateContainerResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """There are no limits to change."""
        return pb.UpdateContainerResourcesResponse()

    async def ReopenContainerLog(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Write on into a new log file."""
        container = await self._running(request.container_id, context)
        assert container.shim is not None
        container.shim.kill(signal.SIGUSR1)
        return pb.ReopenContainerLogResponse()

    async def ExecSync(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Run a command in a container and return its output."""
        container = await self._running(request.container_id, context)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *SHIM, "exec", str(container.dir), *request.cmd, stdin=asyncio.subprocess.DEVNULL, stdout=pipe,
            stderr=pipe, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), request.timeout or None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "command timed out")
        finally:
            if process.returncode is None:
                process.kill()  # and with it, by PR_SET_PDEATHSIG, the command
        return pb.ExecSyncResponse(
            stdout=out[:MAX_EXEC_OUTPUT], stderr=err[:MAX_EXEC_OUTPUT], exit_code=process.returncode
        )

    async def _running(self, key: str, context: Any) -> Container:
        container = await self.container(key, context)
        if not container.running:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the container is not running")
        return container

    # --- streaming: answered by `kube cri-streaming`, see controlplane/streaming.go ---

    async def Exec(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return where to connect to run a command; its "container id" there is the container's directory."""
        container = await self._running(request.container_id, context)
        request.container_id = str(container.dir)
        async with grpc.aio.insecure_channel(f"unix://{self._config.streaming}") as channel:
            return await rpc.RuntimeServiceStub(channel).Exec(request)

    async def PortForward(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return where to connect to reach a pod's port; its "sandbox id" there is the pod's address."""
        sandbox = await self.sandbox(request.pod_sandbox_id, context)
        request.pod_sandbox_id = sandbox.facts["ip"] or "127.0.0.1"
        async with grpc.aio.insecure_channel(f"unix://{self._config.streaming}") as channel:
            return await rpc.RuntimeServiceStub(channel).PortForward(request)
