"""Copies of checkpoints by the unmodified SDK; the server is killed behind its record, and its answer is lost."""

from __future__ import annotations

from functools import partial
from typing import Any

from everloop_trainer.session.identifiers import storage_id
from tests.server.pod import Pod, eventually, kill_process, process_of
from tests.server.sdk import CheckpointProgram
from tests.server.stub import Stub
from tests.server.test_checkpoints import files
from tests.server.test_survival import model_of
from tests.server.wire import Wire

COPY = "/api/v1/copy_weights"


def records(pod: Pod, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the journal."""
    return [record for record in pod.journal() if record["t"] == kind]


def kill_behind_its_record(pod: Pod) -> None:
    """The server, which has answered; what it has made is in the journal."""
    assert len(records(pod, "copied")) == 1
    kill_process(process_of(pod, "server"))


def test_a_server_that_is_killed_behind_its_record_copies_once(own_pod: Pod, gateway: Stub) -> None:
    """No exception; two runs, one record each; what is loaded and sampled is what was copied, its source gone."""
    gateway.losing[COPY] = partial(kill_behind_its_record, own_pod)
    with CheckpointProgram(gateway.url, "copying") as program:
        program.finish()
    assert gateway.losing == {}
    model = model_of(program)
    made = records(own_pod, "copied")
    assert len({record["run"] for record in made}) == len(made) == 2
    answers = [status for path, status, _ in gateway.submits if path == COPY]
    assert answers.count(200) == 2
    assert len(answers) > 2, "the lost one was asked for again"
    copied = program.named("copied")
    for each, record, name in zip(copied, made, ("weights/half", "sampler_weights/thin"), strict=True):
        assert each["path"] == f"tinker://{record['run']}/{name}"
        assert each["rank"] == 4
        assert list(set(each) - {"event", "source", "path", "rank"}) == [name]
        assert each[name] is not None, "it expires"
    before, after, again = (each["scores"] for each in program.named("scores"))
    assert before == after == again
    assert not any((own_pod.root / "models" / storage_id(record["run"])).exists() for record in made)
    eventually(lambda: files(own_pod, model) == [], "the files went with the last that shared them", 30)


def test_bad_copies_name_what_is_wrong(own_pod: Pod) -> None:
    """By field; and nothing is made of them."""
    run = {"session_id": "s-9", "model_seq_id": 0}
    path = "tinker://s-1:train:0/weights/x"
    allowed = {"X-Everloop-Weights": path}
    before = records(own_pod, "copied")
    with Wire(own_pod).client as client:
        wrong: dict[str, list[dict[str, Any]]] = {
            "source_path": [run, {**run, "source_path": 3}],
            "session_id": [{"source_path": path, "model_seq_id": 0}],
            "model_seq_id": [
                {"source_path": path, "session_id": "s-9"},
                {**run, "source_path": path, "model_seq_id": -1},
            ],
            "ttl_seconds": [{**run, "source_path": path, "ttl_seconds": value} for value in (60, 10**12, "3600", True)],
            "weights_access_token": [{**run, "source_path": path, "weights_access_token": "t"}],
        }
        for field, bodies in wrong.items():
            for body in bodies:
                answer = client.post(COPY, json=body, headers=allowed)
                assert answer.status_code == 400, (body, answer.text)
                assert answer.json()["detail"].startswith(f"{field}: "), answer.text
        missing = client.post(COPY, json={**run, "source_path": path}, headers=allowed)
        assert (missing.status_code, missing.json()["detail"][:13]) == (404, "source_path: ")
        foreign = client.post(COPY, json={**run, "source_path": f"{path}-2"}, headers=allowed)
        assert (foreign.status_code, foreign.json()["detail"][:13]) == (404, "source_path: ")
    assert records(own_pod, "copied") == before


def test_only_with_the_right_to_read_is_a_copy_made(own_pod: Pod) -> None:
    """The gateway says so by a header for the very path; a repeat is answered without."""
    wire = Wire(own_pod)
    with wire.client:
        wire.created()
        path = f"tinker://{wire.model}/weights/mine"
        saved = wire.post("save_weights", {"model_id": wire.model, "path": "mine", "seq_id": 1}).json()
        eventually(lambda: "path" in wire.retrieve(saved["request_id"]).json(), "the save", 60)
        asked = {"session_id": "s-9", "model_seq_id": 5, "source_path": path}
        before = records(own_pod, "copied")
        for headers in ({}, {"X-Everloop-Weights": f"{path}s"}):
            assert wire.post("copy_weights", asked, headers=headers).status_code == 404
        assert records(own_pod, "copied") == before
        for headers in ({"X-Everloop-Weights": path}, {}):
            answer = wire.post("copy_weights", asked, headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"tinker_path": "tinker://s-9:train:5/weights/mine"})
        assert len(records(own_pod, "copied")) == len(before) + 1
