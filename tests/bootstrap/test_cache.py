"""The cache: what counts as finished, what its names depend on, who may work on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootstrap import cluster, interpreter, layout, prune
from bootstrap.__main__ import clean, main
from bootstrap.environments import Environments
from bootstrap.layout import BootstrapError
from bootstrap.progress import Progress, clock, run, size
from devcluster.processes import start_ticks


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for directory in [tmp_path, *tmp_path.parents]:
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o755)
    monkeypatch.setenv("EVERLOOP_CACHE", str(tmp_path / "cache"))
    return layout.cache_directory()


def test_closed_place_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that the containers' user cannot reach is refused, and the directory that bars the way is named."""
    bar = tmp_path / "private"
    bar.mkdir(mode=0o700)
    monkeypatch.setenv("EVERLOOP_CACHE", str(bar / "cache"))
    with pytest.raises(BootstrapError, match=r"private is closed to other users \(mode 0700\)"):
        layout.cache_directory()


@pytest.mark.parametrize("place", ["/tmp/cache", "/run/cache", "/var/lib/everloop"])
def test_place_that_pods_cover_is_refused(place: str) -> None:
    """A container that mounts its own /tmp would look there in vain for the programs it runs."""
    with pytest.raises(layout.BootstrapError, match=f"EVERLOOP_CACHE={place}: pods have volumes"):
        layout.check_seen_by_containers(Path(place))


def test_relative_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative cache would move with the working directory."""
    monkeypatch.setenv("EVERLOOP_CACHE", "cache")
    with pytest.raises(BootstrapError, match="absolute"):
        layout.cache_directory()


def test_hash_follows_names_and_bytes(tmp_path: Path) -> None:
    """A changed byte, a changed name and a changed salt give another name; byte code does not."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1")
    first = layout.content_hash([package])
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert layout.content_hash([package]) == first
    assert layout.content_hash([package], "3.12") != first
    (package / "a.py").write_text("2")
    second = layout.content_hash([package])
    (package / "a.py").rename(package / "b.py")
    assert len({first, second, layout.content_hash([package])}) == 3


def test_half_made_is_not_complete(tmp_path: Path) -> None:
    """Only the marker makes a directory complete, and only for the sources that it was made from."""
    assert not layout.is_complete(tmp_path)
    layout.mark_complete(tmp_path, "abc")
    assert layout.is_complete(tmp_path, "abc")
    assert not layout.is_complete(tmp_path, "abd")


def test_failed_step_shows_why(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that fails ends with the last lines of its command."""
    progress = Progress(cache)
    with pytest.raises(BootstrapError, match="no such package"), progress.step("environment x: y") as log:
        run([sys.executable, "-c", "import sys; sys.exit('no such package')"], log)
    assert "environment x: y" in capsys.readouterr().out


def test_one_at_a_time(cache: Path) -> None:
    """A second run waits for the first, says so, and goes on when the first is done."""
    code = (
        "from pathlib import Path; from bootstrap.lock import exclusive\n"
        f"with exclusive(Path({str(cache)!r})): print('mine', flush=True); input()"
    )
    command = [sys.executable, "-c", code]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=layout.REPOSITORY
        )

    with start() as first, start() as second:
        assert first.stdin is not None
        assert second.stdin is not None
        assert first.stdout is not None
        assert second.stdout is not None
        lines = {first.stdout.readline(), second.stdout.readline()}
        assert "mine\n" in lines
        (waiting,) = lines - {"mine\n"}
        assert "waiting for process" in waiting
        for stdin in (first.stdin, second.stdin):
            stdin.write("\n")
            stdin.flush()
        assert first.wait() == second.wait() == 0
        assert "mine\n" in (first.stdout.read(), second.stdout.read())


def test_clean_removes_ours_only(cache: Path) -> None:
    """Cleaning leaves what somebody else put there, and removes the cache if nothing is left."""
    for name in ("venvs", "kube", "uv-cache"):
        (cache / name).mkdir()
    (cache / "letter.txt").write_text("mine")
    clean(cache)
    assert os.listdir(cache) == ["letter.txt"]
    (cache / "letter.txt").unlink()
    clean(cache)
    assert not cache.exists()


def test_prune_keeps_what_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What these sources use, what a running process names and what is being built stay; the rest goes."""
    environments = Environments(cache, interpreter.Interpreter(Path(sys.executable), (3, 11, 0), Path(sys.prefix)))
    monkeypatch.setattr(cluster.Binaries, "locate", lambda: cluster.Binaries(cache / "kube/a/k", cache / "helm/v1/h"))
    present = [*prune.wanted(environments), cache / "kube" / ".b.x1", cache / "venvs" / "tests-running"]
    gone = [cache / "venvs" / "tests-old", cache / "kube" / "b", cache / "images" / "everloop-operator-old"]
    for directory in [*present, *gone]:
        directory.mkdir(parents=True)
    (cache / "images" / "images-old.json").write_text("[]")
    command = [sys.executable, "-c", "input()", str(cache / "venvs" / "tests-running" / "bin")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            prune.prune(environments)
        finally:
            process.communicate()
    assert all(path.exists() for path in present)
    assert not [path for path in [*gone, cache / "images" / "images-old.json"] if path.exists()]
    assert "in use   venvs/tests-running" in capsys.readouterr().out


SLOW_START = """
import subprocess, time
class Slow(subprocess.Popen):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        time.sleep(60)
subprocess.Popen = Slow
"""


@pytest.mark.parametrize("before", ["", SLOW_START], ids=["while it runs", "while it is started"])
def test_terminated_run_leaves_no_child(cache: Path, before: str) -> None:
    """SIGTERM ends what is being built too: nothing writes on into what the next run makes anew."""
    code = (
        f"{before}\n"
        "import sys; from bootstrap import __main__, stage\n"
        "from bootstrap.progress import run\n"
        "from pathlib import Path\n"
        "child = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)']\n"
        f"stage.ensure = lambda *_: run(child, Path({str(cache / 'log')!r}))\n"
        "sys.exit(__main__.main(['ensure', 'lint']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=layout.REPOSITORY, stderr=subprocess.PIPE, text=True)
    log = cache / "log"
    give_up = time.monotonic() + 20
    while not (log.exists() and (lines := log.read_text().splitlines()) and lines[-1].isdigit()):
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.02)
    process.terminate()
    assert "stopped" in process.communicate(timeout=20)[1]
    assert process.returncode == 130
    while start_ticks(int(lines[-1])) is not None:  # killed, but the kernel may still be at it
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_errors_end_with_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """A machine that lacks something gets one message with all of it, and no traceback."""
    monkeypatch.setenv("PATH", str(cache))
    assert main(["ensure", "demo"]) == 1
    message = capsys.readouterr().err
    assert "Go >= 1.26" in message
    assert "C compiler" in message


def test_numbers_are_written_for_people() -> None:
    """Seconds as minutes, bytes as powers of a thousand."""
    assert clock(65) == "1:05"
    assert [size(count) for count in (12, 34_000, 5.6e6, 1.24e9)] == ["12 B", "34 kB", "6 MB", "1.2 GB"]
