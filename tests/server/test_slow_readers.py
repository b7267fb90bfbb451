"""Clients that take their answers slowly or not at all: whom the pod cuts off, and what they hold."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from everloop_http.slow_readers import LONGEST_SECONDS, STALLED_SECONDS, Reader, to_cut
from everloop_trainer.server.process import MOST_UNTAKEN_BYTES as MOST_BYTES
from tests.server.pod import Pod
from tests.server.wire import Wire

NOW = 1000.0
SLACK = 160 << 20
"""Answers that are on their way."""
FRESH = Reader(NOW - 1, NOW, 10)


def late(since: float, held: int = 10, moved: float = NOW) -> Reader:
    return Reader(NOW - since, moved, held)


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([], set()),
        ([FRESH, late(LONGEST_SECONDS - 1), late(60, moved=NOW - STALLED_SECONDS + 1)], set()),
        ([FRESH, late(LONGEST_SECONDS), late(STALLED_SECONDS, moved=NOW - STALLED_SECONDS)], {1, 2}),
        ([late(3, 60), late(2, 40), late(1, 1)], {2}),
        ([late(1, 40), late(3, 60), late(2, 1)], {0}),
        ([late(5, 101), late(3, 1)], {1}),
        ([late(3, 60), late(2, 50), late(1, 40)], {1}),
        ([late(3, 60, moved=NOW - 2), late(2, 50), late(1, 10)], {0}),
        ([late(LONGEST_SECONDS, 100), late(3, 60), late(2, 40)], {0}),
        ([late(1, 60), late(1, 60)], {1}),
    ],
)
def test_who_is_cut_off(readers: Sequence[Reader], expected: set[int]) -> None:
    """Whoever is too slow; beyond 100 bytes who has taken nothing for longest, and of others those that came last."""
    assert to_cut(readers, NOW, 100) == expected


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no process {pid}")


def silent(address: tuple[str, int], request: bytes) -> socket.socket:
    """A connection that has asked, whose client will take next to nothing of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(address)
    connection.sendall(request)
    return connection


def answered(connections: Sequence[socket.socket]) -> None:
    """Waits until each has something to read, or was cut off."""
    for connection in connections:
        ready, _, _ = select.select([connection], [], [], 60)
        assert ready, "no answer"


def test_clients_that_take_nothing_hold_no_memory_of_the_pod(pod: Pod) -> None:
    """Many ask for a large result and never read it: together they hold what is allowed, and the pod serves on."""
    wire = Wire(pod)
    asked = {
        "sampling_session_id": f"{wire.session}:sample:0",
        "seq_id": 0,
        "num_samples": 64,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 100, "stop": []},
        "topk_sample_logprobs": 256,
    }
    request = wire.post("asample", asked, headers={"X-Everloop-Weights": "base"}).json()["request_id"]
    size = len(wire.retrieve(request).content)
    assert size > 12 << 20
    count = MOST_BYTES // size + 60
    server = pod.child("server")
    assert server is not None
    before = resident(server)
    body = b'{"request_id": "%s"}' % request.encode()
    head = [f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {pod.ip}\r\nContent-Type: application/json\r\n"]
    head += [f"{name}: {value}\r\n" for name, value in pod.headers.items()]
    text = "".join(head).encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        connections = [stack.enter_context(silent((pod.ip, 8080), text)) for _ in range(count)]
        answered(connections)
        held = resident(server) - before
        assert held < MOST_BYTES + SLACK, f"{held >> 20} MiB for {count} answers of {size >> 20} MiB"
        assert wire.retrieve(request).status_code == 200
    wire.client.close()
