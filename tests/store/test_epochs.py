"""Who may claim the storage."""

from __future__ import annotations

import pytest

from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.status import Incarnation
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import claim, newest_epoch, next_incarnation, read_fence
from tests.session.world import TIME
from tests.store.crash_files import CrashFiles, Disk

NEWEST = Incarnation(number=5, attempt=3, boot=2, pod_uid="pod-c")


@pytest.mark.parametrize(
    ("attempt", "pod", "expected"),
    [
        (4, "pod-d", Incarnation(6, 4, 1, "pod-d")),
        (9, "pod-d", Incarnation(6, 9, 1, "pod-d")),
        (3, "pod-c", Incarnation(6, 3, 3, "pod-c")),
        (3, "pod-d", None),
        (2, "pod-b", None),
        (2, "pod-c", None),
    ],
    ids=["greater", "much-greater", "restart-in-place", "same-attempt-other-pod", "older", "older-same-pod"],
)
def test_claim_rule(attempt: int, pod: str, expected: Incarnation | None) -> None:
    """A greater attempt, or the same attempt of the same pod, and nobody else."""
    if expected is None:
        with pytest.raises(Fenced, match="superseded by incarnation 5"):
            next_incarnation(NEWEST, attempt, pod)
    else:
        assert next_incarnation(NEWEST, attempt, pod) == expected


class Overtaken(CrashFiles):
    """A rival claims each epoch file just before we do."""

    rival_attempt = 0

    def create(self, path: str, data: bytes) -> None:
        if self.rival_attempt:
            rival, self.rival_attempt = self.rival_attempt, 0
            claim(CrashFiles(self.disk), rival, f"pod-{rival}", TIME)
        super().create(path, data)


def test_a_lost_race_against_a_lesser_attempt_claims_the_next_number() -> None:
    """The loser judges anew: it is still the greatest attempt, so it supersedes the winner."""
    files = Overtaken(Disk())
    files.rival_attempt = 1
    mine, previous = claim(files, 2, "pod-2", TIME)
    assert (mine.number, mine.attempt) == (2, 2)
    assert previous == Incarnation(1, 1, 1, "pod-1")


def test_a_lost_race_against_a_greater_attempt_is_fenced() -> None:
    """The loser judges anew: the winner is newer."""
    files = Overtaken(Disk())
    files.rival_attempt = 3
    with pytest.raises(Fenced, match="attempt 3"):
        claim(files, 2, "pod-2", TIME)
    assert newest_epoch(files) == Incarnation(1, 3, 1, "pod-3")


def test_the_fence_is_the_next_epoch() -> None:
    """An incarnation is over as soon as the next number exists, and not before."""
    files = CrashFiles(Disk())
    mine, _ = claim(files, 1, "pod-1", TIME)
    read_fence(files, mine.number)
    claim(files, 2, "pod-2", TIME)
    with pytest.raises(Fenced, match="superseded by incarnation 2"):
        read_fence(files, mine.number)


def test_a_claim_outlasts_power_loss() -> None:
    """The epoch is durable when claim returns: otherwise two owners could follow each other unseen."""
    disk = Disk()
    claim(CrashFiles(disk), 1, "pod-1", TIME)
    disk.lose_power()
    assert layout.epoch(1) in disk.files
    assert newest_epoch(CrashFiles(disk)) == Incarnation(1, 1, 1, "pod-1")
