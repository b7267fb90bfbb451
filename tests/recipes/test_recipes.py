"""Recipes of tinker-cookbook, unmodified and without a network, while processes under them are killed.

`make acceptance` runs all of them, `make test` two.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everloop_trainer.tinker_proto import tinker_public
from tests.prepared import base_model
from tests.recipes import running
from tests.recipes.recorder import Recording
from tests.recipes.reference import Reference
from tests.recipes.running import Killer, World
from tests.recipes.table import RECIPES, Recipe
from tests.recipes.unbroken import outcomes, repeat, seeds
from tests.server.pod import Pod

ALWAYS = ("sl_loop", "math_rl_arithmetic")
CHOSEN = list(RECIPES) if "EVERLOOP_TEST_WHOLE" in os.environ else ALWAYS
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """What the recipes train on."""
    with running.world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A pod that nobody kills."""
    with running.second_pod(tmp_path_factory.mktemp("second") / "pod") as pod:
        yield pod


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The base model."""
    return Reference(base_model())


@pytest.mark.parametrize("name", CHOSEN)
def test_recipe(name: str, world: World, second: Pod, reference: Reference, tmp_path: Path) -> None:
    """It ends well; its first step is what transformers computes; its results are those of a run without kills."""
    recipe, recording = RECIPES[name], world.recording
    seed = int(os.environ.get("EVERLOOP_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"seed {seed}")
    recording.clear()
    killer = Killer(world.pod, seed)
    recording.accepted = killer.accepted
    running.run(recipe, world, tmp_path / "place")
    killed = killer.join()
    world.pod.wait_until("Serving")
    check_calls(recipe, recording)
    assert len(killed) == (3 if recipe.steps else len(killed))
    compared = compare_first_step(reference, recording)
    assert compared["passes"]
    assert not recipe.samples or compared["samples"]
    journal = world.pod.journal()
    asked = {call.request_id for call in recording.calls}
    broken = {name: each for name, each in outcomes(journal).items() if f"{name[0]}:{name[1]}" in asked}
    assert all(each.ok for each in broken.values())
    unbroken = repeat(recording.calls, seeds(journal), second)
    assert broken == unbroken
    print(
        f"killed {', '.join(killed)}; {len(broken)} operations, all equal; {dict(compared)} compared with transformers"
    )


def check_calls(recipe: Recipe, recording: Recording) -> None:
    """It has made the calls that it is run for."""
    made = Counter(call.name for call in recording.calls)
    assert made["optim_step"] >= recipe.steps
    assert made["create_model"] == 1
    assert (made["asample"] > 0) == recipe.samples, made
    passes = [call for call in recording.calls if call.name == "forward_backward"]
    used = {tinker_public.ForwardBackwardRequest.FromString(call.body).loss_fn for call in passes}
    assert used == recipe.losses


def compare_first_step(reference: Reference, recording: Recording) -> Counter[str]:
    """Losses and log-probabilities told before the first step; returns how many calls were compared."""
    compared: Counter[str] = Counter()
    for kind, tolds in (("passes", reference.passes(recording)), ("samples", reference.samples(recording))):
        for told in tolds:
            compared[kind] += 1
            ours, theirs = told.logprobs
            np.testing.assert_allclose(ours, theirs, atol=LOGPROB_TOLERANCE, err_msg=told.what)
            loss, expected = told.loss
            assert loss == pytest.approx(expected, rel=1e-4, abs=1e-3), told.what
    return compared
