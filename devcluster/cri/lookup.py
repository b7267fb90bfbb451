"""The part of the CRI's runtime service that only looks: states, lists, figures."""

from __future__ import annotations

import time
from typing import Any

import cri_pb2 as pb  # type: ignore[import-not-found]
import cri_pb2_grpc as rpc  # type: ignore[import-not-found]
import grpc

from devcluster.cri.state import Container, Sandbox, matches


class Lookup(rpc.RuntimeServiceServicer):  # type: ignore[misc]
    """Answers about sandboxes and containers."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, Container] = {}

    def boot_id(self) -> str:
        """Return what changes when the node loses its power."""
        raise NotImplementedError

    async def sandbox(self, key: str, context: Any) -> Sandbox:
        """Return a sandbox or answer NOT_FOUND."""
        if key not in self.sandboxes:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no sandbox {key}")
        return self.sandboxes[key]

    async def container(self, key: str, context: Any) -> Container:
        """Return a container as it is now or answer NOT_FOUND."""
        if key not in self.containers:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no container {key}")
        return self.containers[key].refresh()

    async def Version(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name the runtime."""
        return pb.VersionResponse(
            version="0.1.0", runtime_name="devcluster", runtime_version="0.1.0", runtime_api_version="v1"
        )

    async def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Say that all is well."""
        conditions = [pb.RuntimeCondition(type=t, status=True) for t in ("RuntimeReady", "NetworkReady")]
        handlers = [pb.RuntimeHandler(name="")]
        return pb.StatusResponse(status=pb.RuntimeStatus(conditions=conditions), runtime_handlers=handlers)

    async def RuntimeConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Name a cgroup driver, as the kubelet wants one."""
        return pb.RuntimeConfigResponse(linux=pb.LinuxRuntimeConfiguration(cgroup_driver=pb.CGROUPFS))

    async def UpdateRuntimeConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ignore the node's pod range: addresses come from the configuration."""
        return pb.UpdateRuntimeConfigResponse()

    def _sandbox_state(self, sandbox: Sandbox) -> Any:
        ready = sandbox.facts["ready"] and sandbox.facts["boot"] == self.boot_id()
        return pb.SANDBOX_READY if ready else pb.SANDBOX_NOTREADY

    async def PodSandboxStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Describe a sandbox."""
        s = await self.sandbox(request.pod_sandbox_id, context)
        status = pb.PodSandboxStatus(
            id=s.id,
            metadata=s.config.metadata,
            state=self._sandbox_state(s),
            created_at=s.facts["created_at"],
            network=pb.PodSandboxNetworkStatus(ip=s.facts["ip"]),
            linux=pb.LinuxPodSandboxStatus(namespaces=pb.Namespace(options=s.options)),
            labels=s.config.labels,
            annotations=s.config.annotations,
        )
        return pb.PodSandboxStatusResponse(status=status)

    async def ListPodSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        """List sandboxes."""
        f = request.filter
        items = [
            pb.PodSandbox(
                id=s.id,
                metadata=s.config.metadata,
                state=self._sandbox_state(s),
                created_at=s.facts["created_at"],
                labels=s.config.labels,
                annotations=s.config.annotations,
            )
            for s in self.sandboxes.values()
            if (not f.id or s.id.startswith(f.id))
            and (not f.HasField("state") or self._sandbox_state(s) == f.state.state)
            and matches(s.config.labels, f.label_selector)
        ]
        return pb.ListPodSandboxResponse(items=items)

    async def ListContainers(self, request: Any, context: Any) -> Any:  # noqa: N802
        """List containers."""
        f = request.filter
        found = [
            pb.Container(
                id=c.id,
                pod_sandbox_id=c.sandbox_id,
                metadata=c.config.metadata,
                image=c.config.image,
                image_ref=c.config.image.image,
                image_id=c.config.image.image,
                state=c.refresh().state,
                created_at=c.created_at,
                labels=c.config.labels,
                annotations=c.config.annotations,
            )
            for c in self._selected(f)
            if not f.HasField("state") or c.refresh().state == f.state.state
        ]
        return pb.ListContainersResponse(containers=found)

    def _selected(self, f: Any) -> list[Container]:
        return [
            c
            for c in self.containers.values()
            if (not f.id or c.id.startswith(f.id))
            and (not f.pod_sandbox_id or c.sandbox_id == f.pod_sandbox_id)
            and matches(c.config.labels, f.label_selector)
        ]

    async def ContainerStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Describe a container."""
        c = await self.container(request.container_id, context)
        ended = c.exit or {}
        groups = c.config.linux.security_context.supplemental_groups
        user = pb.LinuxContainerUser(uid=c.spec["uid"], gid=c.spec["gid"], supplemental_groups=groups)
        status = pb.ContainerStatus(
            id=c.id,
            metadata=c.config.metadata,
            state=c.state,
            created_at=c.created_at,
            started_at=c.started["at"] if c.started else ended.get("at", 0),
            finished_at=ended.get("at", 0),
            exit_code=ended.get("code", 0),
            reason=ended.get("reason", ""),
            message=ended.get("message", ""),
            image=c.config.image,
            image_ref=c.config.image.image,
            image_id=c.config.image.image,
            labels=c.config.labels,
            annotations=c.config.annotations,
            mounts=c.config.mounts,
            log_path=c.spec["log"],
            resources=pb.ContainerResources(linux=c.config.linux.resources),
            user=pb.ContainerUser(linux=user),
        )
        return pb.ContainerStatusResponse(status=status)

    # --- figures: of the first process only ---

    def _stats(self, c: Container) -> Any:
        cpu, resident = c.usage()
        now, value = time.time_ns(), pb.UInt64Value(value=resident)
        return pb.ContainerStats(
            attributes=pb.ContainerAttributes(
                id=c.id, metadata=c.config.metadata, labels=c.config.labels, annotations=c.config.annotations
            ),
            cpu=pb.CpuUsage(timestamp=now, usage_core_nano_seconds=pb.UInt64Value(value=cpu)),
            memory=pb.MemoryUsage(timestamp=now, working_set_bytes=value, rss_bytes=value, usage_bytes=value),
        )

    async def ContainerStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return a container's figures."""
        c = await self.container(request.container_id, context)
        return pb.ContainerStatsResponse(stats=self._stats(c))

    async def ListContainerStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the figures of containers that run."""
        stats = [self._stats(c) for c in self._selected(request.filter) if c.running]
        return pb.ListContainerStatsResponse(stats=stats)

    async def ListMetricDescriptors(self, request: Any, context: Any) -> Any:  # noqa: N802
        """There are no further figures."""
        return pb.ListMetricDescriptorsResponse()

    async def ListPodSandboxMetrics(self, request: Any, context: Any) -> Any:  # noqa: N802
        """There are no further figures."""
        return pb.ListPodSandboxMetricsResponse()
