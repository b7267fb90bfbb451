"""What the runtime of a node is started with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Config:
    """One node's runtime. All paths are absolute."""

    root: Path
    """The cluster's root, which containers do not see."""
    directory: Path
    """Where the runtime keeps its state and listens (cri.sock)."""
    boot_id: Path
    services: Path
    """JSON list of the cluster's Services."""
    images: Path
    device_plugins: Path
    """The kubelet's directory for device plugins."""
    streaming: Path
    """Socket of ``kube cri-streaming``."""
    prefix: str
    """First two octets of the pods' addresses."""
    gpus: int
    env: dict[str, str]
    """Environment forced on every container."""

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Return what `to_json` wrote."""
        value: dict[str, Any] = json.loads(text)
        paths = ("root", "directory", "boot_id", "services", "images", "device_plugins", "streaming")
        return cls(**{**value, **{name: Path(value[name]) for name in paths}})
