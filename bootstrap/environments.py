"""Virtual environments in the cache, one for each requirements file, installed by uv with every hash checked."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bootstrap import interpreter
from bootstrap.interpreter import Interpreter
from bootstrap.layout import REQUIREMENTS, BootstrapError, content_hash, is_complete, mark_complete
from bootstrap.progress import Progress, run

NAMES = ("operator", "trainer", "client", "client-029", "cookbook", "schemathesis", "devcluster", "tests")
_WHAT = {
    "operator": "operator and gateway",
    "trainer": "torch, transformers, peft",
    "client": "the tinker SDK and nothing else",
    "client-029": "the same of an older SDK",
    "cookbook": "the recipes of tinker-cookbook",
    "schemathesis": "what sends requests drawn from a document of the wire",
    "devcluster": "the local cluster's container runtime",
    "tests": "everything the tests import",
}


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of one cache, all on the same Python."""

    cache: Path
    python: Interpreter

    def directory(self, name: str) -> Path:
        """Return where the environment `name` lies; its name changes with its requirements and with the Python."""
        key = content_hash([REQUIREMENTS / f"{name}.txt"], self.python.version_text, str(self.python.executable))
        return self.cache / "venvs" / f"{name}-{key}"

    @property
    def uv_directory(self) -> Path:
        """Where uv lies, installed or not."""
        return self.cache / "tools" / f"uv-{content_hash([REQUIREMENTS / 'uv.txt'])}"

    def is_ready(self, name: str) -> bool:
        """Whether the environment `name` is installed."""
        return is_complete(self.directory(name))

    def ensure(self, name: str, progress: Progress) -> Path:
        """Return the directory of the environment `name`, installed."""
        directory = self.directory(name)
        if is_complete(directory):
            return directory
        with progress.step(f"environment {name}: {_WHAT[name]}") as log:
            shutil.rmtree(directory, ignore_errors=True)
            uv = self._uv(log)
            self._run_uv(uv, ["venv", "--python", str(self.python.executable), str(directory)], log)
            self._run_uv(
                uv,
                ["pip", "install", "--python", str(directory / "bin" / "python"), "--require-hashes", "--no-deps"]
                + ["--requirements", str(REQUIREMENTS / f"{name}.txt")],
                log,
            )
            mark_complete(directory)
        return directory

    def install_files(self, name: str, directory: Path, log: Path) -> None:
        """Unpack the packages of a requirements file into `directory`, without what they depend on."""
        self._run_uv(
            self._uv(log),
            ["pip", "install", "--python", str(self.python.executable), "--target", str(directory)]
            + ["--require-hashes", "--no-deps", "--requirements", str(REQUIREMENTS / f"{name}.txt")],
            log,
        )

    def _run_uv(self, uv: Path, arguments: list[str], log: Path) -> None:
        settings = {
            "UV_CACHE_DIR": str(self.cache / "uv-cache"),
            "UV_LINK_MODE": "hardlink",  # environments that share torch share its bytes on disk
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_SYSTEM_CERTS": "1",  # as pip does: a company's own authority is trusted where the machine trusts it
            "UV_COMPILE_BYTECODE": "1",  # containers may not write any
        }
        run([str(uv), *arguments], log, settings)

    def _uv(self, log: Path) -> Path:
        """Return the uv binary, installed by pip on first use."""
        requirements = REQUIREMENTS / "uv.txt"
        directory = self.uv_directory
        binary = directory / "bin" / "uv"
        if is_complete(directory):
            return binary
        shutil.rmtree(directory, ignore_errors=True)
        arguments = ["install", "--quiet", "--require-hashes", "--only-binary=:all:", "--requirement"]
        python = python_with(["venv", "ensurepip"])
        if python is not None:
            run([python, "-m", "venv", str(directory)], log)
            run([str(directory / "bin" / "python"), "-m", "pip", *arguments, str(requirements)], log)
        else:
            # Debian keeps venv's ensurepip in a package of its own; pip alone will do.
            python = python_with(["pip"])
            if python is None:
                raise BootstrapError(
                    "no Python here has venv or pip: install one of Debian's python3-venv, python3-pip"
                )
            run([python, "-m", "pip", *arguments, str(requirements), "--target", str(directory)], log)
        mark_complete(directory)
        return binary


def python_with(modules: list[str]) -> str | None:
    """Return the first Python on this machine that has all `modules`."""
    code = f"import sys, {', '.join(modules)}; sys.exit(sys.version_info < {interpreter.MINIMUM})"
    for executable in interpreter.candidates():
        if subprocess.run([executable, "-I", "-c", code], capture_output=True, check=False).returncode == 0:
            return executable
    return None
