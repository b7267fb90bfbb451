"""What the status says of the storage: which claim it is, and which lineage it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everloop_operator.api.training_session_status import StorageStatus
from everloop_operator.core.observed import Observed, Trainer
from everloop_operator.core.report import TrainerReport

from .builders import CLAIMS, after, decided, lost, observed, pod, report, serving

OPENING = TrainerReport.model_validate({"state": "Opening", "storage": {"error": "full"}})
KNOWN = serving(trainer=Trainer(report=report(lineage="line-1")))


def storage_after(observation: Observed) -> StorageStatus:
    result = decided(observation)
    storage = result.status.storage if result.status else observation.session.status.storage
    assert storage is not None
    return storage


def known(**changes: object) -> Observed:
    """A session whose status has claim and lineage already."""
    return after(KNOWN, decided(KNOWN), **changes)


def test_the_claim_is_known_before_there_is_a_pod_and_the_lineage_once_its_server_says_it() -> None:
    """Bindings need the claim as soon as the session is there."""
    first = storage_after(observed())
    assert (first.claim_uid, first.lineage) == ("uid-training", "")
    second = storage_after(KNOWN)
    assert (second.claim_uid, second.lineage) == ("uid-training", "line-1")


@pytest.mark.parametrize(
    "trainer",
    [Trainer(), Trainer(report=OPENING), Trainer(report=report(2, "Recovering", lineage="line-1"))],
    ids=["silent", "opening", "recovering"],
)
def test_the_lineage_stays_while_a_new_attempt_starts(trainer: Trainer) -> None:
    """Otherwise calls would wait for longer than the pod needs."""
    moving = known(nodes={"node-a": lost()})
    storage = storage_after(after(moving, decided(moving), pods=(pod(2),), trainer=trainer))
    assert (storage.claim_uid, storage.lineage) == ("uid-training", "line-1")


def test_another_claim_of_the_name_has_no_lineage_until_its_server_says_it() -> None:
    """Nothing that the first one held is to be looked for in the second."""
    other = {**CLAIMS, "training": replace(CLAIMS["training"], uid="uid-other")}
    exchanged = known(claims=other, trainer=Trainer())
    storage = storage_after(exchanged)
    assert (storage.claim_uid, storage.lineage) == ("uid-other", "")
    reported = after(exchanged, decided(exchanged), trainer=Trainer(report=report(lineage="line-2")))
    assert storage_after(reported).lineage == "line-2"


def test_a_claim_that_is_gone_has_no_uid_and_one_that_cannot_be_read_keeps_it() -> None:
    """A moment without an answer of the API server tells nothing of the storage."""
    gone = storage_after(known(claims={**CLAIMS, "training": None}, trainer=Trainer()))
    assert (gone.claim_uid, gone.lineage) == ("", "")
    unread = storage_after(known(claims={"models": CLAIMS["models"]}, trainer=Trainer()))
    assert (unread.claim_uid, unread.lineage) == ("uid-training", "line-1")
