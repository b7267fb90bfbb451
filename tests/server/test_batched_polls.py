"""Waiting for all samples of a client with one call, by the unmodified SDK, through the loss of the server."""

from __future__ import annotations

from collections import Counter

from tests.networks import new_address
from tests.server.pod import Pod, eventually, kill_process, process_of
from tests.server.sdk import SdkProgram
from tests.server.stub import Stub, serving
from tests.server.wire import Wire

SAMPLES = 150


def sampled(stub: Stub) -> list[list[int] | str]:
    """What a program sees that sends many samples."""
    with SdkProgram(stub.url, "many", samples=SAMPLES) as program:
        program.finish()
    return list(program.named("sampled")[0]["answers"])


def test_samples_that_are_waited_for_together_are_the_same(own_pod: Pod) -> None:
    """Each is fetched once, after it has ended; what ended while the server was away is told by the next one."""
    with serving(own_pod, new_address(), {}) as stub:
        alone = sampled(stub)
    assert alone[SAMPLES // 2] == "user"
    assert len({str(answer) for answer in alone}) == SAMPLES
    with serving(own_pod, new_address(), {"sample_use_retrieve_futures": True}) as stub:
        with SdkProgram(stub.url, "many", samples=SAMPLES) as program:
            eventually(lambda: ("/api/v1/retrieve_futures", 200) in paths(stub), "the first have ended")
            kill_process(process_of(own_pod, "server"))
            program.finish()
        assert program.named("sampled")[0]["answers"] == alone
        asked = paths(stub)
    assert asked["/api/v1/retrieve_future", 408] == 0
    assert asked["/api/v1/retrieve_futures", 200] > 1
    assert asked["/api/v1/retrieve_future", 200] == SAMPLES
    records = own_pod.journal()
    second = next(index for index, record in enumerate(records) if record["t"] == "open" and record["n"] == 2)
    for part in (records[:second], records[second:]):
        assert [record for record in part if record["t"] == "result"], "some ended on either side of the kill"


def paths(stub: Stub) -> Counter[tuple[str, int]]:
    """How often each path was answered with each status."""
    return Counter((path, status) for path, status, _ in list(stub.submits))


def test_what_cannot_be_waited_for_is_refused_by_name(own_pod: Pod) -> None:
    """An unknown sampling session, and numbers that are none."""
    wire = Wire(own_pod)
    target = {"type": "sampling_session", "sampling_session_id": f"{wire.session}:sample:0"}
    unknown = wire.post("retrieve_futures", {"target": target})
    assert unknown.status_code == 410
    assert "target.sampling_session_id" in unknown.json()["detail"]
    for body, field in (
        ({}, "target"),
        ({"target": target | {"cloned_sampler_id": -1}}, "target.cloned_sampler_id"),
        ({"target": target, "prev_cursor": -1}, "prev_cursor"),
        ({"target": target, "timeout": "inf"}, "timeout"),
        ({"target": target, "retrieved_request_ids": [1]}, "retrieved_request_ids[0]"),
    ):
        refused = wire.post("retrieve_futures", body)
        assert refused.status_code == 400
        assert field in refused.json()["detail"]
    wire.client.close()
