"""Builds the Kubernetes binary, Helm and an S3 server from their Go modules, once, into a cache outside the checkout.

The cache is ``$EVERLOOP_CACHE`` (default /var/cache/everloop). What is in it is complete: every build goes to a
temporary directory that is renamed at its end, so an interrupted build leaves nothing that looks finished.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "controlplane"
LINKS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
HELM_VERSION = "v4.3.1"
S3_VERSION = "v1.8.0"
PROTOS = {
    "cri": ("k8s.io/cri-api", "pkg/apis/runtime/v1/api.proto"),
    "deviceplugin": ("k8s.io/kubelet", "pkg/apis/deviceplugin/v1beta1/api.proto"),
}
REPORT_SECONDS = 5.0

Say = Callable[[str], None]


class BuildError(Exception):
    """A tool is missing or a build failed; the message says which and why."""


def say_on_stderr(line: str) -> None:
    """Print a line of progress where it does not mix with a command's result."""
    print(line, file=sys.stderr, flush=True)


def cache_directory() -> Path:
    """Return the directory that holds everything built."""
    cache = Path(os.environ.get("EVERLOOP_CACHE") or "/var/cache/everloop")
    if not cache.is_absolute():
        raise BuildError(f"EVERLOOP_CACHE={cache}: must be an absolute path")
    return cache


@functools.cache
def go_environment() -> dict[str, str]:
    """Return the environment of Go's commands: its own caches, or ours where it can't write its own (no home)."""
    own = json.loads(_run_go(["env", "-json", "GOCACHE", "GOMODCACHE"], Path("/"), dict(os.environ)))
    if all(_can_write(place) for place in own.values()):
        return dict(os.environ)
    ours = cache_directory() / "go"
    return {**os.environ, "GOPATH": str(ours), "GOMODCACHE": str(ours / "mod"), "GOCACHE": str(ours / "build")}


def _can_write(place: str) -> bool:
    """Whether a directory can be written to, or made."""
    path = Path(place)
    if not path.is_absolute():  # "off" or "": Go found no place
        return False
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


@functools.cache
def kube_directory() -> Path:
    """Return where the Kubernetes binary of these sources and this Go lies or will lie.

    Raises:
        BuildError: there is no Go.
    """
    digest = hashlib.sha256(_go("env", "GOVERSION", "GOARCH").encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".go", ".mod", ".sum"):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return cache_directory() / "kube" / digest.hexdigest()[:16]


def helm_path() -> Path:
    """Return where the Helm binary lies or will lie."""
    return cache_directory() / "helm" / HELM_VERSION / "helm"


def s3_path() -> Path:
    """Return where the S3 server lies or will lie: versitygw, which keeps objects as files and checks signatures."""
    return cache_directory() / "s3" / S3_VERSION / "versitygw"


def protobuf_directory(kube: Path) -> Path:
    """Return where the generated CRI modules for the installed gRPC and protobuf lie or will lie."""
    versions = (importlib.metadata.version(name) for name in ("grpcio", "protobuf"))
    return kube / f"pb-{'-'.join(versions)}"


def ensure_kube(say: Say = say_on_stderr) -> Path:
    """Return the directory of the Kubernetes binary and the names it is called by; builds it when it is missing.

    Also generates the gRPC modules of the container runtime interface (see `protobuf_directory`).
    The first build takes minutes (about 4 on 2 cores) and 3 GB of Go's caches; `say` gets lines of progress.

    Raises:
        BuildError: there is no Go, or the build failed.
    """
    target = kube_directory()
    if not target.is_dir():
        with _exclusive("kube"):
            if not target.is_dir():
                with _staging(target) as directory:
                    _build_kube(directory, say)
    generated = protobuf_directory(target)
    if not generated.is_dir():
        with _exclusive("kube"):
            if not generated.is_dir():
                with _staging(generated) as directory:
                    _generate(target / "proto", directory)
    return target


def ensure_helm(say: Say = say_on_stderr) -> Path:
    """Return the path of the Helm binary; builds it when it is missing (2 minutes).

    Raises:
        BuildError: there is no Go, or the build failed.
    """
    return _ensure_module("helm", helm_path(), f"helm.sh/helm/v4/cmd/helm@{HELM_VERSION}", "some 900", say)


def ensure_s3(say: Say = say_on_stderr) -> Path:
    """Return the path of the S3 server; builds it when it is missing (2 minutes). Raises BuildError."""
    package = f"github.com/versity/versitygw/cmd/versitygw@{S3_VERSION}"
    return _ensure_module("s3", s3_path(), package, "some 900", say)


def _ensure_module(name: str, target: Path, package: str, total: str, say: Say) -> Path:
    if not target.is_file():
        with _exclusive(name):
            if not target.is_file():
                with _staging(target.parent) as directory:
                    say(f"{name}: building {package} from its Go module; this happens once")
                    command = ["go", "install", "-v", "-trimpath", package]
                    environment = {**go_environment(), "GOBIN": str(directory)}
                    _compile(name, command, Path("/"), environment, total, say)
    return target


def _build_kube(directory: Path, say: Say) -> None:
    say("kube: building Kubernetes from its Go modules; this happens once and takes minutes")
    say("kube: fetching modules")
    total = len(_go("list", "-deps", ".", cwd=SOURCES).splitlines())
    version = _go("list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes", cwd=SOURCES)
    stamp = "k8s.io/component-base/version"
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    flags = " ".join(["-s", "-w", *(f"-X {stamp}.{key}={value}" for key, value in values.items())])
    command = ["go", "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", flags]
    _compile("kube", [*command, "-o", str(directory / "kube"), "."], SOURCES, go_environment(), str(total), say)
    for name in LINKS:
        (directory / name).symlink_to("kube")
    (directory / "proto").mkdir()
    for name, (module, path) in PROTOS.items():
        source = Path(_go("list", "-m", "-f", "{{.Dir}}", module, cwd=SOURCES)) / path
        shutil.copyfile(source, directory / "proto" / f"{name}.proto")


def _generate(protos: Path, directory: Path) -> None:
    names = [str(path) for path in sorted(protos.glob("*.proto"))]
    options = [f"-I{protos}", f"--python_out={directory}", f"--grpc_python_out={directory}"]
    done = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, *names], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"generating the CRI modules (needs grpcio-tools): {done.stderr.strip()}")


def _compile(name: str, command: list[str], cwd: Path, environment: dict[str, str], total: str, say: Say) -> None:
    """Run a Go build that names each package it compiles, and report how far it is every few seconds."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError as e:
        raise BuildError("go: not found; Go >= 1.26 is needed to build the local cluster") from e
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        lines.extend(iter(process.stderr.readline, ""))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while reader.is_alive():
            reader.join(REPORT_SECONDS)
            compiled = sum(not line.startswith("go: ") for line in lines)
            fetched = len(lines) - compiled
            modules = f", {fetched} modules fetched" if fetched else ""
            say(f"{name}: {compiled} of {total} packages compiled{modules}, {time.monotonic() - start:.0f} s")
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status != 0:
        raise BuildError(f"{name}: {' '.join(command)} exited {status}:\n{''.join(lines[-30:])}")
    say(f"{name}: built in {time.monotonic() - start:.0f} s")


def _go(*arguments: str, cwd: Path = Path("/")) -> str:
    return _run_go(arguments, cwd, go_environment())


def _run_go(arguments: Sequence[str], cwd: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(["go", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        raise BuildError("go: not found; Go >= 1.26 is needed to build the local cluster") from e
    if done.returncode != 0:
        raise BuildError(f"go {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """One builder at a time; a second one waits and then finds the work done."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Give a directory that becomes `target` if the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield directory
        directory.chmod(0o755)
        directory.rename(target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
