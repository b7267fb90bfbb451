"""What the tests stand on, as the bootstrap prepared it: binaries, the base model, the client's environment."""

from __future__ import annotations

import functools
from pathlib import Path

from bootstrap import layout, stage
from bootstrap import prometheus as bootstrap_prometheus
from bootstrap.environments import Environments
from bootstrap.interpreter import choose
from bootstrap.progress import Progress
from devcluster import build


@functools.cache
def prepared() -> stage.Ready:
    """Where everything lies; makes what is missing."""
    return stage.prepare()


def client_python() -> str:
    """Interpreter of the environment that holds the tinker SDK and nothing of ours."""
    return str(prepared().client_python)


def environment_python(name: str) -> str:
    """Interpreter of an environment that few tests need; made now if nothing else has done it."""
    cache = layout.cache_directory()
    progress = Progress(cache)
    return str(Environments(cache, choose(cache, progress)).ensure(name, progress) / "bin" / "python")


def kube_binary() -> Path:
    """The one Kubernetes binary; kubectl is a link to it."""
    return prepared().kubectl.resolve()


def s3_server() -> Path:
    """The S3 server's binary; built now if nothing else has done it."""
    return build.ensure_s3()


def prometheus(name: str = "prometheus") -> Path:
    """`prometheus` or `promtool`; fetched now if nothing else has done it."""
    cache = layout.cache_directory()
    bootstrap_prometheus.ensure(cache, Progress(cache))
    return bootstrap_prometheus.binary(cache, name)


def base_model() -> Path:
    """SmolLM2-135M-Instruct as a transformers directory."""
    return prepared().model
