"""Removes from the cache what neither the present sources nor a running process uses."""

from __future__ import annotations

import shutil
from pathlib import Path

from bootstrap import cluster, images, prometheus, weights
from bootstrap.disk import disk_use
from bootstrap.environments import NAMES, Environments
from bootstrap.progress import size
from devcluster.processes import all_pids, cluster_roots
from devcluster.settings import Layout


def wanted(environments: Environments) -> dict[Path, str]:
    """Return what the present sources use, with what it is to people."""
    binaries = cluster.Binaries.locate()
    return {
        **{environments.directory(name): f"environment {name}" for name in NAMES},
        binaries.kubectl.parent: "Kubernetes, one binary",
        binaries.helm.parent: "Helm",
        cluster.s3_server(environments.cache).parent: "S3 server of the tests",
        prometheus.directory(environments.cache): "Prometheus of the tests",
        weights.directory(environments.cache): f"model {weights.MODEL}",
        **{images.directory(environments.cache, image): f"image {image.name}" for image in images.IMAGES},
        images.images_file(environments): "names of the images",
        environments.uv_directory: "uv",
    }


def superseded(environments: Environments) -> list[Path]:
    """Return what was made for other sources, or half made. Nothing hidden: that may be a build at work."""
    keep = wanted(environments)
    kinds = ("helm", "images", "kube", "models", "prometheus", "s3", "tools", "venvs")
    found = (path for kind in kinds for path in sorted((environments.cache / kind).glob("*")))
    return [path for path in found if path not in keep and not path.name.startswith(".")]


def used_by_processes() -> str:
    """Return a text in which the path of everything stands that a running process, or a local cluster, may need."""
    texts = []
    for pid in all_pids():
        for name in ("environ", "cmdline"):
            try:
                texts.append(Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace"))
            except OSError:
                continue  # ended meanwhile, or another user's
    for root in cluster_roots():
        layout = Layout(root)
        texts += [path.read_text() for path in (layout.images, layout.settings) if path.is_file()]
    return "\0".join(texts)


def prune(environments: Environments) -> None:
    """Remove what is superseded and not in use. The caller holds the cache's lock."""
    used, freed, seen = used_by_processes(), 0, set[int]()
    for path in superseded(environments):
        shown = path.relative_to(environments.cache)
        if str(path) in used:
            print(f"  in use   {shown}")
            continue
        freed += disk_use(path, seen)
        print(f"  removing {shown}")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    print(f"everloop: removed {size(freed)}; what environments share stays in uv-cache until `make clean-cache`")
