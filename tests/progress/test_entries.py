"""What a line of a report may say, and what is said of one that may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop_operator.core.jobs.report import Point
from everloop_progress.entries import LONGEST_CHECKPOINT, BadLine, Entry, parse

PATH = "tinker://s-0123-4567:train:0/weights/it-3"


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        (line(iteration=1), Entry(1, {})),
        (line(iteration=3, reward=0.5), Entry(3, {"reward": 0.5})),
        (line(iteration=3, metrics={"loss": 1, "a/b.c-d": 2.5}), Entry(3, {"loss": 1.0, "a/b.c-d": 2.5})),
        (line(iteration=3, reward=-2, metrics={"loss": 1}), Entry(3, {"loss": 1.0, "reward": -2.0})),
        (line(iteration=3, checkpoint=PATH), Entry(3, {}, PATH)),
        (line(iteration=3, checkpoint=None, reward=None, metrics=None, time=None), Entry(3, {})),
        (line(iteration=3, time="2026-05-01T12:00:00Z"), Entry(3, {}, "", "2026-05-01T12:00:00Z")),
        (line(iteration=3, done=True), Entry(3, {}, done=True)),
        (line(iteration=3, done=False), Entry(3, {})),
        (line(iteration=3, done=None), Entry(3, {})),
        (line(iteration=3, more="of a later version"), Entry(3, {})),
    ],
)  # fmt: skip
def test_what_a_line_says(text: bytes, entry: Entry) -> None:
    """Everything but the iteration may be left out; what is not known is passed over."""
    assert parse(text, first=1) == entry


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "not a JSON object"),
        (b"\x00\xff garbage", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"[" * 60_000, "not a JSON object"),
        (b'{"iteration": 1', "not a JSON object"),
        (line(), "iteration:"),
        (line(iteration=0), "iteration:"),
        (line(iteration=-1), "iteration:"),
        (line(iteration=True), "iteration:"),
        (line(iteration="1"), "iteration:"),
        (line(iteration=1.0), "iteration:"),
        (line(iteration=10**10), "iteration:"),
        (line(iteration=1, reward="much"), "reward:"),
        (line(iteration=1, reward=True), "reward:"),
        (line(iteration=1, reward=1e16), "reward:"),
        (b'{"iteration": 1, "reward": NaN}', "NaN is no number"),
        (b'{"iteration": 1, "reward": 1e999}', "reward:"),
        (line(iteration=1, metrics=[1]), "metrics:"),
        (line(iteration=1, metrics={"a": None}), r"metrics\.a:"),
        (line(iteration=1, metrics={"a b": 1}), "metrics:"),
        (line(iteration=1, metrics={str(n): n for n in range(65)}), "metrics:"),
        (line(iteration=1, checkpoint="/var/lib/everloop/other"), "checkpoint:"),
        (line(iteration=1, checkpoint="tinker://m/sampler_weights/x"), "checkpoint:"),
        (line(iteration=1, checkpoint="tinker://m/weights/x\n"), "checkpoint:"),
        (line(iteration=1, checkpoint="tinker://m/weights/" + "x" * 600), "checkpoint:"),
        (line(iteration=1, done="yes"), "done:"),
        (line(iteration=1, done=1), "done:"),
        (line(iteration=1, time="yesterday"), "time:"),
        (line(iteration=1, time="2026-05-01T12:00:00"), "time:"),
        (line(iteration=1, time=3), "time:"),
    ],
)
def test_bad_lines_are_refused_by_field(text: bytes, complaint: str) -> None:
    """The message says what is wrong, in words that fit into a condition."""
    with pytest.raises(BadLine, match=complaint) as caught:
        parse(text, first=1)
    assert len(str(caught.value)) < 200


def test_evaluation_may_be_of_the_beginning() -> None:
    """Iteration 0: before anything was trained."""
    assert parse(line(iteration=0, metrics={"solved": 0.1}), first=0).iteration == 0


def test_checkpoints_fit_into_the_report() -> None:
    """Reader and operator agree on the longest path."""
    path = "tinker://m/weights/" + "x" * (LONGEST_CHECKPOINT - 19)
    assert len(path) == LONGEST_CHECKPOINT
    assert Point(checkpoint=parse(line(iteration=1, checkpoint=path), first=1).checkpoint).checkpoint == path
