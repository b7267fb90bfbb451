"""What the demo and the tests stand on, made if need be: environments, binaries, images, the base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bootstrap import cluster, images, interpreter, layout, machine, prometheus, weights
from bootstrap.environments import Environments
from bootstrap.images import OPERATOR_IMAGE, TRAINER_IMAGE
from bootstrap.lock import exclusive
from bootstrap.progress import Progress

__all__ = ["OPERATOR_IMAGE", "TARGETS", "TRAINER_IMAGE", "Parts", "Ready", "ensure", "prepare"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a target needs: environments by name, and whether the local cluster, S3 and Prometheus."""

    environments: tuple[str, ...]
    cluster: bool = False
    s3: bool = False
    prometheus: bool = False


DEMO = Parts(("devcluster", "operator", "trainer", "client"), cluster=True)
TARGETS = {
    "demo": DEMO,
    "test": Parts(("tests", "client-029", "cookbook", *DEMO.environments), cluster=True, s3=True, prometheus=True),
    "lint": Parts(("tests",)),
    "operator": Parts(("operator",)),
    "devcluster": Parts(("devcluster",)),
}


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the prepared things lie."""

    kubectl: Path
    helm: Path
    images: Path
    """The file that tells the local cluster what its image names stand for."""
    model: Path
    """The base model as a transformers directory."""
    client_python: Path
    """A Python whose environment holds the tinker SDK and nothing of ours."""


def prepare() -> Ready:
    """Make everything that the local cluster, the chart and a client need, and say where it lies.

    Raises:
        BootstrapError: the machine lacks something, or a step failed.
    """
    cache = layout.cache_directory()
    environments = ensure(cache, DEMO)
    binaries = cluster.Binaries.locate()
    return Ready(
        kubectl=binaries.kubectl,
        helm=binaries.helm,
        images=images.images_file(environments),
        model=weights.directory(cache),
        client_python=environments.directory("client") / "bin" / "python",
    )


def ensure(cache: Path, parts: Parts) -> Environments:
    """Make all of `parts` that is not in `cache`; one process at a time does so."""
    with exclusive(cache):
        progress = Progress(cache)
        environments = Environments(cache, interpreter.choose(cache, progress))
        whole = all(environments.is_ready(name) for name in parts.environments)
        if not whole or (parts.cluster and not cluster.is_ready()):
            machine.check(cache, cluster=parts.cluster)
        if parts.cluster:
            layout.check_seen_by_containers(cache)
        for name in parts.environments:
            environments.ensure(name, progress)
        if parts.cluster:
            cluster.ensure(environments, progress)
            weights.ensure(environments, progress)
            images.ensure(environments, progress)
        if parts.s3:
            cluster.ensure_s3(environments, progress)
        if parts.prometheus:
            prometheus.ensure(cache, progress)
        progress.finish()
    return environments
