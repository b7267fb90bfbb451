"""The CRI's image service: every image exists unless its entry says otherwise, and pulling one records its name."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cri_pb2 as pb  # type: ignore[import-not-found]
import cri_pb2_grpc as rpc  # type: ignore[import-not-found]
import grpc

from devcluster.cri.images import Images


class ImageService(rpc.ImageServiceServicer):  # type: ignore[misc]
    """Images of one node."""

    def __init__(self, images: Images, directory: Path, pulled: Iterable[str]) -> None:
        self._images = images
        self._directory = directory
        self._pulled = set(pulled)

    def _message(self, name: str) -> Any:
        uid = pb.Int64Value(value=self._images[name].uid)
        return pb.Image(id=name, repo_tags=[name], size=1, uid=uid, spec=pb.ImageSpec(image=name), pinned=True)

    async def ListImages(self, request: Any, context: Any) -> Any:  # noqa: N802
        """List the images that were pulled."""
        wanted = request.filter.image.image
        return pb.ListImagesResponse(images=[self._message(n) for n in sorted(self._pulled) if wanted in ("", n)])

    async def ImageStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Say whether an image was pulled."""
        name = request.image.image
        return pb.ImageStatusResponse(image=self._message(name) if name in self._pulled else None)

    async def PullImage(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Pull an image, or fail as its entry says."""
        name = request.image.image
        if error := self._images[name].pull_error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error)
        self._pulled.add(name)
        return pb.PullImageResponse(image_ref=name)

    async def RemoveImage(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Forget an image."""
        self._pulled.discard(request.image.image)
        return pb.RemoveImageResponse()

    async def ImageFsInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Images take no space."""
        usage = pb.FilesystemUsage(
            timestamp=time.time_ns(),
            fs_id=pb.FilesystemIdentifier(mountpoint=str(self._directory)),
            used_bytes=pb.UInt64Value(value=1),
            inodes_used=pb.UInt64Value(value=1),
        )
        return pb.ImageFsInfoResponse(image_filesystems=[usage], container_filesystems=[usage])
