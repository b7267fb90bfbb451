"""The accumulation-window rule, as a table."""

from __future__ import annotations

import pytest

from everloop_trainer.session.operations import (
    Arguments,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Refused,
    SaveWeights,
)
from everloop_trainer.session.ports import Position
from everloop_trainer.session.windows import Failure, Finished, spoiling_failure

FB = ForwardBackward(False, "cross_entropy")
FORWARD = ForwardBackward(True, "cross_entropy")
STEP = OptimStep(1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0)
CREATE = CreateModel("smol", 4, 7, True, True, True)
STEP_ACCEPTED = Position(2, 500)
BEFORE, AFTER, EARLIER, LATER = Position(2, 499), Position(2, 501), Position(1, 900), Position(3, 5)
EARLIEST = Position(1, 5)
MEANWHILE = Position(1, 800)


def finished(
    seq: int,
    args: Arguments,
    *,
    ok: bool = True,
    dropped: bool = False,
    sent: Position = EARLIEST,
    ended: Position = MEANWHILE,
    told: Position | None = None,
) -> Finished:
    return Finished(seq, args, ok, dropped, sent, ended, told)


@pytest.mark.parametrize(
    ("window", "failure"),
    [
        ([], None),
        ([finished(0, CREATE), finished(1, FB), finished(2, FB)], None),
        ([finished(1, FB, ok=False)], 1),
        ([finished(1, FB, ok=False, told=BEFORE)], None),
        ([finished(1, FB, ok=False, told=AFTER)], 1),
        ([finished(1, FB, ok=False, told=EARLIER)], None),
        ([finished(1, FB, ok=False, told=LATER)], 1),
        ([finished(1, FB, ok=False, told=BEFORE), finished(2, FB, ok=False)], 2),
        ([finished(1, FB), finished(2, FB, ok=False), finished(3, FB)], 2),
        ([finished(1, FORWARD, ok=False)], None),
        ([finished(1, SaveWeights("n"), ok=False)], None),
        ([finished(1, Refused("forward_backward", "images"), ok=False)], 1),
        ([finished(1, Refused("forward_backward", "images", forward_only=True), ok=False)], None),
        ([finished(1, Refused("save_weights", "not served"), ok=False)], None),
        ([finished(1, Refused("load_weights", "not served"), ok=False)], 1),
        ([finished(1, LoadWeights("tinker://none", True), ok=False)], 1),
        ([finished(1, FB, ok=False), finished(2, LoadWeights("tinker://one", True))], None),
        ([finished(1, FB, ok=False), finished(2, STEP)], None),
        ([finished(1, FB, ok=False), finished(2, STEP, ok=False, dropped=True)], None),
        ([finished(1, FB), finished(2, STEP, ok=False)], 2),
        ([finished(1, FB), finished(2, Refused("optim_step", "dimuon"), ok=False)], 2),
        ([finished(1, FB, ok=False), finished(2, STEP), finished(3, FB, ok=False)], 3),
    ],
    ids=[
        "empty",
        "all-good",
        "failed-untold",
        "told-before-the-step-was-accepted",
        "told-after-the-step-was-accepted",
        "told-by-an-earlier-incarnation",
        "told-by-a-later-incarnation",
        "one-told-one-not",
        "failure-between-good-ones",
        "failed-forward-only",
        "failed-save",
        "refused-forward-backward",
        "refused-forward-only",
        "refused-other",
        "refused-load",
        "failed-load",
        "window-closed-by-a-load",
        "window-closed-by-a-step",
        "window-closed-by-a-dropping-step",
        "refused-step-keeps-the-window-open",
        "refused-optimizer-keeps-the-window-open",
        "second-window",
    ],
)
def test_which_step_fails(window: list[Finished], failure: int | None) -> None:
    """The first failure that the client was not told of when the step was accepted, if there is one."""
    found = spoiling_failure(window, STEP_ACCEPTED)
    assert (found.seq if found else None) == failure


@pytest.mark.parametrize(
    ("window", "failure"),
    [
        ([finished(1, FB), finished(2, FB, ok=False, told=EARLIER)], Failure(2, 1)),
        ([finished(1, FB, ok=False, told=EARLIER), finished(2, FB)], Failure(1, 2)),
        ([finished(1, FB, ok=False, told=EARLIER), finished(2, FB, sent=BEFORE)], None),
        (
            [finished(1, FB, ended=EARLIEST), finished(2, FB, ok=False, sent=MEANWHILE, ended=BEFORE, told=BEFORE)],
            None,
        ),
        ([finished(1, FB), finished(2, FB, ok=False, sent=EARLIEST, told=EARLIER)], Failure(2, 1)),
        ([finished(1, FB, ended=EARLIEST), finished(2, FB, ok=False, sent=MEANWHILE, told=EARLIER)], Failure(2, 1)),
        ([finished(1, FB), finished(2, STEP), finished(3, FB, ok=False, told=EARLIER)], None),
        ([finished(1, FORWARD), finished(2, FB, ok=False, told=EARLIER)], None),
        ([finished(1, FB), finished(2, FORWARD, ok=False, told=EARLIER)], None),
        ([finished(1, FB), finished(2, Refused("forward_backward", "images"), ok=False, told=EARLIER)], Failure(2, 1)),
        ([finished(1, FB), finished(2, STEP, ok=False, told=EARLIER)], None),
        ([finished(1, FB), finished(2, Refused("optim_step", "dimuon"), ok=False, told=EARLIER)], None),
        ([finished(1, FB), finished(2, LoadWeights("tinker://none", True), ok=False, told=EARLIER)], None),
    ],
    ids=[
        "chunk-before",
        "chunk-behind",
        "sent-knowing",
        "ended-before-the-failed-one-was-sent",
        "ended-after-the-failed-one-was-sent",
        "ended-before-the-failed-one-was-given-up",
        "of-the-window-before",
        "added-nothing",
        "failed-forward-only",
        "refused",
        "failed-step",
        "refused-step",
        "failed-load",
    ],
)
def test_what_was_sent_beside_a_failure_is_not_applied(window: list[Finished], failure: Failure | None) -> None:
    """Told of the failure or not: what was accumulated unknowingly may be half of the call that failed."""
    assert spoiling_failure(window, STEP_ACCEPTED) == failure
