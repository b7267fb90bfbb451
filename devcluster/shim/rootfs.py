"""A container's file system: the host's files under a private writable layer, and the pod's volumes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from devcluster.shim import linux
from devcluster.shim.linux import StartError, mount

DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse", "shm", "pts", "infiniband")
KERNEL_PLACES = ("proc", "sys", "dev", "run")
MAX_SYMLINKS = 40


def make_root(spec: dict[str, Any], directory: Path) -> None:
    """Build the file system of a container in this process's mount namespace and move into it.

    Raises:
        StartError: a volume is missing or the kernel refuses a mount.
    """
    mount(None, Path("/"), flags=linux.MS_REC | linux.MS_SLAVE)
    base = directory / "fs"
    base.mkdir(exist_ok=True)
    # The layer is a tmpfs: it may not lie inside the lower directory, and it goes away by itself with the
    # container's last process.
    mount("tmpfs", base, "tmpfs", 0, "mode=755")
    for name in ("upper", "work", "root"):
        (base / name).mkdir(mode=0o755)
    root = base / "root"
    bind(root, root)
    layers = _add_layers(base)
    for point in _host_mounts(spec["hidden"]):
        bind(point, _below(root, point))
    if spec["pid_namespace"]:
        mount("proc", root / "proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    else:
        bind(Path("/proc"), root / "proc")
    bind(Path("/sys"), root / "sys")
    _make_dev(root)
    for hidden in spec["hidden"]:  # the cluster's own files, its keys among them
        target = _below(root, Path(hidden))
        if target.is_dir():
            mount("tmpfs", target, "tmpfs", linux.MS_RDONLY, "mode=755")
    if spec["cwd"] != "/":
        resolve(root, spec["cwd"]).mkdir(parents=True, exist_ok=True)
    binds = _volumes(spec, base)
    for source, path, _ in binds:
        _make_target(source, resolve(root, path))
    if spec["readonly_rootfs"]:  # before the volumes: one may lie on a layer's very root, and stays writable
        for layer in layers:
            mount(None, layer, flags=linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY)
    for source, path, readonly in binds:
        bind(source, resolve(root, path), readonly=readonly)
    linux.pivot_into(root)


def _volumes(spec: dict[str, Any], base: Path) -> list[tuple[Path, str, bool]]:
    """Return what is bound into a container: source, container path, read-only; outer paths first."""
    volumes: list[tuple[Path, str, bool]] = []
    files = spec["files"]
    for volume in sorted(spec["mounts"], key=lambda m: m["target"].count("/")):
        source = Path(os.path.realpath(volume["source"]))
        if not source.exists():
            raise StartError(f"mount source {volume['source']} does not exist")
        if volume["target"] not in files:
            volumes.append((source, volume["target"], volume["readonly"]))
    for path, text in files.items():
        source = base / Path(path).name
        source.write_text(text)
        volumes.append((source, path, False))
    return volumes


def resolve(root: Path, path: str) -> Path:
    """Return the real location below `root` of a container's path: symbolic links stay inside.

    Raises:
        StartError: the links go in circles.
    """
    todo, done, links = path.split("/"), root, 0
    while todo:
        part = todo.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            done = root if done == root else done.parent
            continue
        here = done / part
        if not here.is_symlink():
            done = here
            continue
        links += 1
        if links > MAX_SYMLINKS:
            raise StartError(f"too many symbolic links in {path}")
        target = str(here.readlink())
        if target.startswith("/"):
            done = root
        todo = target.split("/") + todo
    return done


def bind(source: Path, target: Path, *, readonly: bool = False) -> None:
    """Show a file or directory at another place too, which is made if need be."""
    _make_target(source, target)
    mount(str(source), target, flags=linux.MS_BIND | linux.MS_REC)
    if readonly:
        # Flags that the source's own mount has must be kept, or the kernel refuses.
        kept = os.statvfs(target).f_flag & (linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        mount(None, target, flags=linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | kept)


def _make_target(source: Path, target: Path) -> None:
    if target.exists():
        return
    if source.is_dir():
        target.mkdir(parents=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=0o644)


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _host_mounts(hidden: Sequence[str]) -> Iterator[Path]:
    """Yield mount points of real file systems other than / that a container should see."""
    skip = [*(f"/{name}" for name in KERNEL_PLACES), *hidden]
    points = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for point in sorted(points - {"/"}):
        if not any(Path(point).is_relative_to(s) for s in skip) and Path(point).exists():
            yield Path(point)


def _make_dev(root: Path) -> None:
    dev = root / "dev"
    mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID, "mode=755")
    for path in [*(Path("/dev") / name for name in DEVICES), *Path("/dev").glob("nvidia*")]:
        if path.exists():
            bind(path, dev / path.name)
    for name, to in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (dev / name).symlink_to(f"/proc/self/fd{to}")
    (dev / "ptmx").symlink_to("pts/ptmx")


def _add_layers(base: Path) -> list[Path]:
    """Fill base/root with the host's files, each top directory under a private layer, and return the layers.

    One overlay over / would do for root. In a user namespace the kernel does not allow a lower directory that has
    mounts of its parent below it.
    """
    options = ",userxattr" if linux.in_user_namespace() else ""
    root = base / "root"
    layers = [root]
    for entry in os.scandir("/"):
        target = root / entry.name
        if entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
        elif entry.name in KERNEL_PLACES:
            target.mkdir(mode=0o755)
        elif not entry.is_dir():
            bind(Path(entry.path), target, readonly=True)
        else:
            upper, work = base / "upper" / entry.name, base / "work" / entry.name
            mode = stat.S_IMODE(entry.stat().st_mode)
            for path in (upper, work, target):
                path.mkdir()
                path.chmod(mode)
            data = f"lowerdir={entry.path},upperdir={upper},workdir={work}{options}"
            try:
                mount("overlay", target, "overlay", 0, data)
            except StartError:  # some file systems can't be a lower directory: then without a private layer
                bind(Path(entry.path), target)
            layers.append(target)
    return layers
