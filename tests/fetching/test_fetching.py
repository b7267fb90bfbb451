"""The model cache is filled from S3 and from the hub: once, whole, and from where a killed one broke off."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from everloop_operator.cluster.trainer import TrainerClient
from everloop_operator.loop.ports import Unanswered
from everloop_trainer.basefiles import files_sha256
from everloop_trainer.fetching.cache import fill
from everloop_trainer.fetching.files import FetchFailed, SourceFile
from tests.copies.store import BUCKET, Request, Store, error, running
from tests.fetching.hub import COMMIT, REPO, Hub, serving
from tests.fetching.slow import Slow
from tests.networks import new_address

TRAINER = Path(__file__).resolve().parents[2] / "trainer_image"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001.safetensors": random.Random(1).randbytes(3 << 20),
    "tokenizer.json": b"{}",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def bucket(store: Store, request: pytest.FixtureRequest) -> Iterator[str]:
    """A prefix with the model, and things beside it that are none of it."""
    prefix = f"f-{request.node.name.partition('[')[0]}"
    client = store.client()
    for name, data in {**FILES, ".git/config": b"x"}.items():
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)
    yield prefix
    store.fault = None


class Fetch:
    """The init container, as a process."""

    def __init__(self, directory: Path, tmp: Path, environment: dict[str, str] | None = None, **source: Any) -> None:
        self.termination = tmp / "termination"
        self.termination.touch()
        self.log = tmp / "fetch.log"
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(TRAINER),
            "HOME": str(tmp),
            "HF_HUB_OFFLINE": "1",
            "EVERLOOP_TERMINATION_LOG": str(self.termination),
            "EVERLOOP_FETCH": json.dumps({"format": 1, "directory": str(directory), **source}),
            **(environment or {}),
        }

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "everloop_trainer", "fetch"]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def run(self) -> int:
        process = self.start()
        try:
            return process.wait(60)
        finally:
            process.kill()


def assert_filled(directory: Path, revision: str = "") -> None:
    """All files, and a record of them; nothing that would change the identity of the model."""
    assert {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")} == FILES
    record = json.loads((directory / ".everloop.json").read_text())
    assert record["revision"] == revision
    hashes = {item["name"]: item["sha256"] for item in record["files"]}
    assert hashes == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    plain = directory.parent / "plain"
    plain.mkdir(exist_ok=True)
    for name, data in FILES.items():
        (plain / name).write_bytes(data)
    assert files_sha256(directory) == files_sha256(plain)


def s3(store: Store, tmp_path: Path, bucket: str) -> dict[str, str]:
    return store.s3(store.credentials(tmp_path / "secret"), bucket)


def test_from_s3(store: Store, tmp_path: Path, bucket: str) -> None:
    """And a second pod asks for nothing any more."""
    directory = tmp_path / "cache" / "s3" / "model"
    fetch = Fetch(directory, tmp_path, s3=s3(store, tmp_path, bucket))
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(directory)
    store.requests.clear()
    assert fetch.run() == 0
    assert store.requests == []


def test_from_a_store_that_knows_no_tags(store: Store, tmp_path: Path) -> None:
    """One that shows files which it has not written itself: their size is all that can be checked."""
    place = store.directory / BUCKET / "files"
    place.mkdir()
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    fetch = Fetch(tmp_path / "cache" / "model", tmp_path, s3=s3(store, tmp_path, "files"))
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(tmp_path / "cache" / "model")


def test_a_killed_fetch_is_gone_on_with(store: Store, tmp_path: Path, bucket: str) -> None:
    """SIGKILL while a file hangs: what had come is not fetched again, and the lock is free at once."""
    directory = tmp_path / "cache" / "model"
    fetch = Fetch(directory, tmp_path, s3=s3(store, tmp_path, bucket))

    def fault(request: Request) -> float | None:
        return 60.0 if request.method == "GET" and request.path.endswith("tokenizer.json") else None

    store.fault = fault
    store.blocked.clear()
    process = fetch.start()
    assert store.blocked.wait(60)
    large = tmp_path / "cache" / ".model.partial" / "model-00001.safetensors"
    give_up = time.monotonic() + 30
    while not (large.is_file() and large.stat().st_size == len(FILES[large.name])) and time.monotonic() < give_up:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not directory.exists()
    store.fault = None
    store.requests.clear()
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(directory)
    assert not [r for r in store.requests if r.method == "GET" and r.path.endswith(".safetensors")]


def test_the_rest_of_a_file_is_asked_for(store: Store, tmp_path: Path, bucket: str) -> None:
    """A partial file is not thrown away."""
    directory = tmp_path / "cache" / "model"
    partial = tmp_path / "cache" / ".model.partial"
    partial.mkdir(parents=True)
    (partial / "model-00001.safetensors").write_bytes(FILES["model-00001.safetensors"][:1000])
    store.requests.clear()
    assert Fetch(directory, tmp_path, s3=s3(store, tmp_path, bucket)).run() == 0
    assert_filled(directory)
    assert "bytes=1000-" in [request.headers.get("Range") for request in store.requests]


def test_a_file_that_comes_damaged_is_no_file(store: Store, tmp_path: Path, bucket: str) -> None:
    """What a partial file holds is wrong: the sum tells, and the next try begins it anew."""
    directory = tmp_path / "cache" / "model"
    partial = tmp_path / "cache" / ".model.partial"
    partial.mkdir(parents=True)
    (partial / "model-00001.safetensors").write_bytes(b"else")
    fetch = Fetch(directory, tmp_path, s3=s3(store, tmp_path, bucket))
    assert fetch.run() == 1
    assert "model-00001.safetensors came damaged" in fetch.termination.read_text()
    assert not directory.exists()
    assert fetch.run() == 0
    assert_filled(directory)


async def test_how_far_it_is_is_told_to_the_operator(store: Store, tmp_path: Path, bucket: str) -> None:
    """What an earlier try left counts; on the pod's own address, and to nobody without the session's token."""
    directory, name, ip = tmp_path / "cache" / "model", "model-00001.safetensors", new_address()
    partial = tmp_path / "cache" / ".model.partial"
    partial.mkdir(parents=True)
    (partial / name).write_bytes(FILES[name][: 2 << 20])
    (tmp_path / "token").write_text("the-token")
    told = {"POD_IP": ip, "EVERLOOP_TOKEN_FILE": str(tmp_path / "token")}
    fetch, client = Fetch(directory, tmp_path, told, s3=s3(store, tmp_path, bucket)), TrainerClient()
    store.fault = lambda request: 60.0 if request.kind == "GET" and name in request.path else None
    process = fetch.start()
    try:
        async with asyncio.timeout(30):
            report = None
            while report is None or report.fetching is None or report.fetching.percent == 0:
                try:
                    report = await client.ask(ip, "the-token")
                except Unanswered:
                    assert process.poll() is None, fetch.log.read_text()
                await asyncio.sleep(0.1)
        assert (report.state, report.serving, report.fetching.percent) == ("Fetching", False, 66)
        assert report.fetching.total_bytes == sum(len(data) for data in FILES.values())
        with pytest.raises(Unanswered, match="401"):
            await client.ask(ip, "another")
        other = await asyncio.to_thread(httpx.post, f"http://{ip}:8080/api/v1/optim_step")
        assert other.status_code == 503
    finally:
        process.kill()
        process.wait()
        await client.close()
    store.fault = None
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(directory)


def test_what_s3_says_is_told(store: Store, tmp_path: Path, bucket: str) -> None:
    """In the termination message, where the operator finds it; without a secret."""
    fetch = Fetch(tmp_path / "cache" / "model", tmp_path, s3=s3(store, tmp_path, bucket))
    store.fault = lambda _: error("AccessDenied", 403)
    assert fetch.run() == 1
    told = fetch.termination.read_text()
    assert told.startswith("FetchFailed: ")
    assert "AccessDenied" in told
    assert "test-secret" not in told + fetch.log.read_text()


def test_nothing_below_the_prefix_is_no_model(store: Store, tmp_path: Path) -> None:
    """A misspelt prefix is a failure, not an empty model."""
    fetch = Fetch(tmp_path / "cache" / "model", tmp_path, s3=s3(store, tmp_path, "nothing-there"))
    assert fetch.run() == 1
    assert "there are no files of a model" in fetch.termination.read_text()


def test_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    """Field by field."""
    fetch = Fetch(tmp_path / "model", tmp_path, s3={"uri": "bucket"})
    assert fetch.run() == 78
    assert "s3.uri" in fetch.termination.read_text()


# --- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    beside = {"pytorch_model.bin": b"x", "onnx/model.json": b"x", ".gitattributes": b"x", "README.md": b"x"}
    with serving(Hub({**FILES, **beside})) as hub:
        yield hub


def from_hub(hub: Hub, tmp_path: Path, **more: str) -> Fetch:
    source = {"repo": REPO, **more}
    return Fetch(tmp_path / "cache" / "hub" / "model", tmp_path, {"HF_ENDPOINT": hub.url}, huggingFace=source)


def test_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Of one commit, which is recorded; other formats of the same weights stay there."""
    fetch = from_hub(hub, tmp_path)
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(tmp_path / "cache" / "hub" / "model", COMMIT)


def test_a_token_is_read_from_its_file(hub: Hub, tmp_path: Path) -> None:
    """And is in no log and no message."""
    hub.token = "hf_very_secret"
    fetch = from_hub(hub, tmp_path)
    assert fetch.run() == 1
    assert "FetchFailed" in fetch.termination.read_text()
    (tmp_path / "token").write_text("hf_very_secret\n")
    fetch = from_hub(hub, tmp_path, tokenFile=str(tmp_path / "token"))
    assert fetch.run() == 0, fetch.log.read_text()
    assert_filled(tmp_path / "cache" / "hub" / "model", COMMIT)
    assert hub.token not in fetch.log.read_text()


def test_an_answer_that_breaks_off_is_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    """Of the same file, from the last of the 10 MB that the hub's client writes at once."""
    large = random.Random(2).randbytes(24 << 20)
    hub.files["model-00002.safetensors"] = large
    hub.cut["model-00002.safetensors"] = 23 << 20
    fetch = from_hub(hub, tmp_path)
    while (code := fetch.run()) != 0:
        assert code == 1
    assert (tmp_path / "cache" / "hub" / "model" / "model-00002.safetensors").read_bytes() == large
    assert [int(each.removeprefix("bytes=").removesuffix("-")) for each in hub.ranges] == [20 << 20]


def test_an_unknown_model_is_named(hub: Hub, tmp_path: Path) -> None:
    """By the hub's own words."""
    fetch = from_hub(hub, tmp_path, revision="no-such-branch")
    assert fetch.run() == 1
    assert "org/small at no-such-branch" in fetch.termination.read_text()


# --- the lock -------------------------------------------------------------------------------------------------------


def test_two_pods_fill_it_once(tmp_path: Path) -> None:
    """The second waits for the first, and finds it done."""
    code = (
        "import sys; from pathlib import Path; from everloop_trainer.fetching.cache import fill\n"
        "from tests.fetching.slow import Slow\n"
        "fill(Path(sys.argv[1]), Slow(Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache" / "model"), str(tmp_path / "asked")]
    environment = {**os.environ, "PYTHONPATH": f"{TRAINER}:{TRAINER.parent}"}
    pods = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    assert (tmp_path / "asked").read_text() == "x"


def test_a_name_that_leads_outside_is_refused(tmp_path: Path) -> None:
    """Whatever a source calls its files."""

    class Outside(Slow):
        def files(self) -> tuple[str, Sequence[SourceFile]]:
            return "", [SourceFile("../../escaped", 2, "size")]

    with pytest.raises(FetchFailed, match="outside"):
        fill(tmp_path / "cache" / "model", Outside(tmp_path / "asked"))
    assert not (tmp_path / "escaped").exists()
