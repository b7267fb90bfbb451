"""Order within a stream, and the plain values around it."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from everloop_trainer.session.history import History
from everloop_trainer.session.identifiers import (
    model_id,
    request_id,
    sampling_session_id,
    split_request_id,
    storage_id,
    tinker_path,
)
from everloop_trainer.session.operations import (
    Arguments,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Refused,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    arguments_from_json,
    arguments_to_json,
)
from everloop_trainer.session.outcomes import JSON
from everloop_trainer.session.ports import Lora, Manifest, Position
from everloop_trainer.session.records import (
    Accept,
    Autosaved,
    Deliver,
    Loaded,
    Open,
    Pruned,
    Record,
    Result,
    Seal,
    Stored,
    Try,
)
from everloop_trainer.session.recovery import plans
from everloop_trainer.session.streams import Ended, Entry, Stream
from everloop_trainer.store.segments import encode, read_at
from tests.session.world import BASE, SAMPLER, SESSION, TIME, A, create, fb, load, optim, sample, save


def entry(stream: str, operation: Operation, offset: int = 0, *, durable: bool = True) -> Entry:
    return Entry(stream, operation.seq, operation.args, Position(1, offset), durable)


def ended(operation: Operation, *, ok: bool = True) -> Ended:
    result = Result(operation.stream, operation.seq, ok, JSON, 0)
    if not ok:
        result = replace(result, error="no", category="user")
    return Ended(result, Position(1, 10_000 + operation.seq))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_model_runs_in_number_order_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    """Early arrivals wait; each number runs exactly when those below it have ended."""
    operations = [create(A), fb(A, 1), fb(A, 2), optim(A, 3)]
    stream, ran = Stream(A), []
    for arrived in order:
        stream.accept(entry(A, operations[arrived]))
        while (ready := stream.ready()) is not None:
            ran.append(ready.seq)
            stream.end(ready.seq, ended(operations[ready.seq]))
    assert ran == [0, 1, 2, 3]
    assert stream.done == 4
    assert not stream.pending


def test_a_gap_is_named() -> None:
    """What a stream waits for is the lowest number that has not arrived."""
    stream = Stream(A)
    assert stream.missing() is None
    stream.accept(entry(A, fb(A, 2)))
    assert stream.missing() == 0
    stream.accept(entry(A, create(A)))
    assert stream.missing() is None
    stream.end(0, ended(create(A)))
    assert stream.missing() == 1


def test_samples_run_as_they_were_accepted() -> None:
    """A sampling session has no gaps: its operations are unordered among each other."""
    stream = Stream(SAMPLER)
    for seq in (5, 2, 9):
        stream.accept(entry(SAMPLER, sample(SAMPLER, seq)))
    ran = []
    while (ready := stream.ready()) is not None:
        ran.append(ready.seq)
        stream.end(ready.seq, ended(sample(SAMPLER, ready.seq)))
    assert ran == [5, 2, 9]
    assert stream.missing() is None


def test_nothing_runs_before_it_is_durable() -> None:
    """An operation whose record is not on disk yet must have no effect."""
    stream = Stream(A)
    waiting = entry(A, create(A), durable=False)
    stream.accept(waiting)
    assert stream.ready() is None
    waiting.durable = True
    assert stream.ready() is waiting


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([Result(A, 0, True, JSON, 0)], "never accepted"),
        ([Deliver(A, 0)], "never accepted"),
        ([Accept(A, 0, create(A).args, TIME)] * 2, "accepted twice"),
        ([Accept(A, 0, create(A).args, TIME), *[Result(A, 0, True, JSON, 0)] * 2], "was not pending"),
        ([Accept(A, 1, fb(A, 1).args, TIME), Result(A, 1, True, JSON, 0)], "ended before number 0"),
    ],
    ids=["result-of-nothing", "delivery-of-nothing", "accepted-twice", "ended-twice", "out-of-order"],
)
def test_a_history_that_contradicts_itself_is_refused(records: list[Record], complaint: str) -> None:
    """Each update is in the history once, or the history is not believed."""
    history = History()
    *good, last = records
    for offset, record in enumerate(good):
        history.apply(record, Position(1, offset))
    with pytest.raises(ValueError, match=complaint):
        history.apply(last, Position(1, len(good)))


EVERY_KIND: list[Arguments] = [
    CreateModel("smol", 4, 7, True, False, True, {"run": [1, None, "x"]}),
    ForwardBackward(True, "cross_entropy"),
    OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 1.0),
    OptimStep(float("inf"), 0.9, 0.95, 1e-12, 0.0, 1.0),
    SaveWeights("n", 3600, True, {"a": "b"}),
    SaveWeightsForSampler(None, 3, "inflight"),
    SaveWeightsExternal("n", 3600, ("age1x", "ssh-rsa y")),
    Sample((1, 2), 2, None, 0.7, 0.9, 5, ("a", "b"), 11, None),
    Sample((), 2, 8, 0.7, 0.9, -1, (7, 8), 11, "frozen:m-1/1-2"),
    Sample((), 2, 8, 0.7, 0.9, -1, (), 11, "sampler"),
    Sample((), 2, 8, 0.7, 0.9, -1, "stop", 11, "sampler"),
    LoadWeights("tinker://m/weights/n", True, "frozen:m-1/1-2", "org/base", {"a": "b"}),
    Refused("load_weights", "not served"),
]


@pytest.mark.parametrize("args", EVERY_KIND)
def test_arguments_survive_the_journal(args: Arguments) -> None:
    """Every kind comes back equal, types included."""
    assert arguments_from_json(args.KIND, arguments_to_json(args)) == args


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("optim_step", {"beta1": "0.9"}, "a.beta1"),
        ("optim_step", {"beta3": 1.0}, "a.beta3"),
        ("nothing", {}, "nothing"),
    ],
)
def test_a_wrong_argument_in_the_journal_is_named(kind: str, change: dict[str, object], complaint: str) -> None:
    """Nothing is converted, ignored or defaulted in silence."""
    values = arguments_to_json(OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 1.0)) | change
    with pytest.raises(ValueError, match=complaint):
        arguments_from_json(kind, values)


@pytest.mark.parametrize(
    "record",
    [
        Open(3, 2, 1, "pod", (Seal(1, 10, "ab"), Seal(2, 0, "cd")), TIME),
        Accept(A, 1, ForwardBackward(False, "ppo"), TIME),
        Try(A, 1, 4242),
        Result(A, 1, True, JSON, 3, stored=Stored("weights", "1-5", "ab", 7, TIME)),
        Result(A, 1, True, JSON, 3, loaded=Loaded("frozen:m-1/1-5", "1-1")),
        Result(A, 1, False, JSON, 3, "bad", "user", gradients_dropped=True),
        Deliver(A, 1),
        Autosaved(A, 4, "auto-2", 2, Stored("weights", "1-4", "ab", 7, TIME)),
        Pruned(A, "1-4"),
    ],
)
def test_records_survive_the_journal(record: Record) -> None:
    """Every record comes back equal."""
    data = encode(record, b"body", 77)
    found = read_at(io.BytesIO(data), 0, len(data), "journal")
    assert found is not None
    assert (found.record, found.body, found.end) == (record, b"body", len(data))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Operation("nowhere", 0, OptimStep(1, 1, 1, 1, 1, 1)), "stream: 'nowhere'"),
        (lambda: replace(fb(A, 1), seq=-1), "seq: must not be negative"),
        (lambda: replace(create(A), seq=1), "seq: 1"),
        (lambda: replace(fb(A, 1), seq=0), "seq: 0"),
        (lambda: replace(fb(A, 1), stream=SAMPLER), "stream: a forward_backward"),
        (lambda: replace(sample(SAMPLER, 0), stream=A), "stream: a sample"),
    ],
)
def test_an_operation_that_cannot_exist_is_refused_at_once(make: Callable[[], Operation], complaint: str) -> None:
    """The stream and the number must fit the kind."""
    with pytest.raises(ValueError, match=complaint):
        make()


def test_names() -> None:
    """Ids as the SDK computes them, and back."""
    assert model_id(SESSION, 0) == A
    assert sampling_session_id(SESSION, 0) == SAMPLER
    assert split_request_id(request_id(A, 12)) == (A, 12)
    assert split_request_id(A) is None  # "{session}:train" is no stream
    assert split_request_id(f"{A}:x") is None
    assert split_request_id("") is None
    assert tinker_path(A, "weights", "n") == f"tinker://{A}/weights/n"
    assert storage_id("s-1:train:0") == "m-" + hashlib.sha256(b"s-1:train:0").hexdigest()[:12]


def snapshot(seq: int, offset: int) -> Manifest:
    lora = Lora(4, 7, True, True, True)
    return Manifest(
        "snapshots", f"1-{seq}", A, request_id(A, seq), seq, 0, Position(1, offset), BASE, lora, 32, "ab", 1, TIME
    )


def test_plans_replay_what_changed_the_model_after_the_snapshot() -> None:
    """Newest snapshot first, then older ones, then none; failed, forward-only and save operations are not replayed."""
    operations = [
        (create(A), True),
        (fb(A, 1), True),
        (fb(A, 2), False),
        (optim(A, 3), True),
        (fb(A, 4, forward_only=True), True),
        (save(A, 5, "n"), True),
        (fb(A, 6), True),
        (optim(A, 7), True),
    ]
    stream = Stream(A)
    for offset, (operation, ok) in enumerate(operations):
        stream.accept(entry(A, operation, offset))
        stream.end(operation.seq, ended(operation, ok=ok))
    stream.accept(entry(A, fb(A, 8), 99))
    found = plans(stream, [snapshot(3, 1), snapshot(8, 3), snapshot(6, 2)])
    assert [(plan.resumed_from, [e.seq for e in plan.replay]) for plan in found] == [
        (6, [7]),
        (3, [6, 7]),
        (0, [1, 3, 6, 7]),
    ]


def test_a_loaded_model_comes_back_from_snapshots_since_the_load_only() -> None:
    """What a load read may be gone, so nothing before it counts; nor does a snapshot of a load that failed."""
    path = "tinker://other/weights/n"
    operations = [
        (create(A), True),
        (fb(A, 1), True),
        (load(A, 2, path), True),
        (optim(A, 3), True),
        (load(A, 4, path), False),
        (fb(A, 5), True),
    ]
    stream = Stream(A)
    for offset, (operation, ok) in enumerate(operations):
        stream.accept(entry(A, operation, offset))
        stream.end(operation.seq, ended(operation, ok=ok))
    found = plans(stream, [snapshot(1, 1), snapshot(2, 2), snapshot(4, 3)])
    assert [(plan.resumed_from, [e.seq for e in plan.replay]) for plan in found] == [(2, [3, 5])]
    assert plans(stream, [snapshot(1, 1)]) == []
