"""The losses as a user's program sees them: the unmodified SDK in a process of its own, against a pod."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.networks import new_address
from tests.server.pod import Pod, eventually, kill_process, process_of
from tests.server.sdk import TorchProgram
from tests.server.sdk_losses import OPTIONS
from tests.server.stub import Stub, serving


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


def test_a_traced_loss_on_the_server(make_pod: Callable[..., Pod]) -> None:
    """It trains bit by bit as in the client, metrics included, while engine and server are killed.

    The models of another session can't use it.
    """
    pod = make_pod()
    pod.start()
    status = pod.wait_until("Serving")
    config = {"fwdbwd_max_chunk_len": 2, "custom_loss_server_side": True}
    with serving(pod, new_address(), config) as stub, TorchProgram(stub.url, "traced_loss") as program:
        eventually(lambda: len(program.named("step")) >= 1, "a step", 60)
        kill_process(status["engine"]["pid"])
        eventually(lambda: len(program.named("step")) >= 2, "two steps", 60)
        kill_process(process_of(pod, "server"))
        program.finish()
    assert program.named("created") == [{"event": "created", "uploaded": True}]
    steps = program.named("step")
    assert len(steps) == 4
    for event in steps:
        assert event["after"][0] == event["after"][1]
        assert set(event["client"]) - set(event["server"]) == {"surrogate_loss:sum"}
        for name, value in event["server"].items():
            assert event["client"][name] == pytest.approx(value, rel=1e-5), name
    assert steps[3]["after"] != steps[0]["after"]
    (refused,) = program.named("refused")
    assert "loss_fn_config.loss_id: the loss was made in session" in refused["error"]
    ended = pod.status()
    assert ended is not None
    assert ended["replayMismatches"] == 0
    assert [each["reason"] for each in ended["recoveries"]][-1] == "ServerRestarted"
