"""The losses as a user's program sees them: the unmodified SDK in a process of its own, against a pod."""

from __future__ import annotations

import pytest

from tests.server.sdk import TorchProgram
from tests.server.sdk_losses import OPTIONS
from tests.server.stub import Stub


def test_policy_gradients_of_what_was_sampled(stub: Stub) -> None:
    """The trainer's log-probabilities are the sampler's, ratios are 1, and each loss moves them the right way."""
    with TorchProgram(stub.url, "policy_gradients") as program:
        program.finish()
    trained = {event["loss_fn"]: event for event in program.named("trained")}
    assert trained.keys() == OPTIONS.keys()
    for loss_fn, event in trained.items():
        assert event["far"] < 1e-4, loss_fn
        assert event["named"] == (["stable_reinforce_stand_in:max"] if loss_fn == "stable_reinforce" else [])
        (good, bad), (better, worse) = event["logprobs"]
        assert better > good, loss_fn
        assert worse < bad, loss_fn
        ratios_are_one = -(6 * 1.0 - 6 * 0.5)
        likelihood = -(good * 1.0 - bad * 0.5)
        expected = likelihood if loss_fn in ("cispo", "dro", "stable_reinforce") else ratios_are_one
        assert event["loss"] == pytest.approx(expected, abs=2e-3), loss_fn


def test_a_loss_of_ones_own(stub: Stub) -> None:
    """forward_backward_custom that imitates cross_entropy trains as it does."""
    with TorchProgram(stub.url, "own_loss") as program:
        program.finish()
    steps = program.named("step")
    assert len(steps) == 3
    for event in steps:
        assert event["custom"] == pytest.approx(event["built_in"], rel=1e-5)
    assert steps[2]["built_in"] != steps[0]["built_in"]
