"""The local cluster's binaries, Kubernetes and Helm, built from their Go modules by `devcluster`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bootstrap.environments import Environments
from bootstrap.layout import REPOSITORY, BootstrapError
from bootstrap.progress import Progress, run
from devcluster import build


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where the binaries lie, built or not."""

    kubectl: Path
    helm: Path

    @classmethod
    def locate(cls) -> Binaries:
        """Return where the binaries of the present sources and Go toolchain lie or will lie.

        Raises:
            BootstrapError: there is no Go.
        """
        try:
            return cls(build.kube_directory() / "kubectl", build.helm_path())
        except build.BuildError as error:
            raise BootstrapError(str(error)) from error


def is_ready() -> bool:
    """Whether Kubernetes and Helm are built."""
    try:
        binaries = Binaries.locate()
    except BootstrapError:
        return False
    return binaries.kubectl.exists() and binaries.helm.exists()


def s3_server(cache: Path) -> Path:
    """Return where the tests' S3 server lies in a cache, built or not."""
    return cache / "s3" / build.S3_VERSION / build.s3_path().name


def ensure_s3(environments: Environments, progress: Progress) -> None:
    """Build the tests' S3 server if it is missing: about 2 minutes on 2 cores."""
    if not s3_server(environments.cache).exists():
        _build("s3", "S3 server: built from its Go module", environments, progress)


def ensure(environments: Environments, progress: Progress) -> None:
    """Build what is missing: about 4 and 2 minutes on 2 cores, 3 GB of Go's own caches."""
    if is_ready():
        return
    binaries = Binaries.locate()
    if not binaries.kubectl.exists():
        _build("build", "Kubernetes: built from its Go modules", environments, progress)
    if not binaries.helm.exists():
        _build("helm", "Helm: built from its Go module", environments, progress)


def _build(command: str, what: str, environments: Environments, progress: Progress) -> None:
    python = environments.ensure("devcluster", progress) / "bin" / "python"
    settings = {"EVERLOOP_CACHE": str(environments.cache), "PYTHONDONTWRITEBYTECODE": "1"}
    with progress.step(what) as log:
        run([str(python), "-m", "devcluster", command], log, settings, cwd=REPOSITORY)
