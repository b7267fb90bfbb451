"""Stops a session pod in a given moment of the operation that the loop is about to send.

The engine is stopped before the loop goes on, so that the operation surely waits in it once the journal shows it tried;
then it computes for a drawn time and is stopped again, and after it the server, which would else write on. Whether that
is the moment, the journal says, not this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.store.layout import MANIFEST
from tests.e2e.waiting import eventually
from tests.matrix import pod as pods
from tests.matrix.moments import QUIET, Key, Moment, falls_in, has_begun, news
from tests.matrix.pod import Pod
from tests.matrix.stage import Stage

LONGEST_RUN_SECONDS = {
    Moment.FORWARD_BACKWARD: 0.2,
    Moment.SAMPLE: 0.1,
    Moment.OPTIM_STEP: 0.001,
    Moment.CREATE_MODEL: 0.004,
    Moment.BEFORE_MANIFEST: 0.01,
    Moment.LOAD_STATE: 0.01,
}
"""How far into an operation a kill may fall, in CPU seconds of the engine: about as long as such an operation takes."""
LONGEST_SAVE_SECONDS = 30.0
LONGEST_ACCEPT_SECONDS = 30.0
HASTE = -10
STEP_SECONDS = 0.0001
"""CPU time; between a manifest's name and the record of the result the server needs some ten times as much."""


def catch(stage: Stage, pod: Pod, moment: Moment, known: Collection[Key], tried: int, go: Callable[[], None]) -> bool:
    """Hold the pod in the moment; whether that was met. If not, everything runs on as if nothing had been.

    Args:
        stage: where.
        pod: the session's.
        moment: the wanted one.
        known: operations that were accepted before the loop came here.
        tried: how often the moment was missed so far: each time less is dared.
        go: lets the loop send its operation; called exactly once unless nothing has to be under way.
    """
    if moment in QUIET:
        return falls_in(moment, stage.facts(), known, ())
    if moment == Moment.ACCEPTED:
        return _catch_acceptance(stage, pod, known, go)
    pods.stop(pod.engine)
    go()
    eventually(lambda: has_begun(moment, stage.facts(), known), f"the operation of {moment} to begin")
    with _in_haste():
        match moment:
            case Moment.BETWEEN_CHUNKS:
                pods.go_on(pod.engine)
                first = news(moment, stage.facts(), known)[0]
                eventually(lambda: bool(stage.facts().results[first]), "the first chunk's result", pause=0.005)
                pods.stop(pod.engine)
            case Moment.AFTER_MANIFEST:
                _stop_behind_manifest(stage, pod, news(moment, stage.facts(), known)[0])
            case _:
                pods.run_on(pod.engine, stage.rng.uniform(0, LONGEST_RUN_SECONDS[moment]) / 2**tried)
                pods.wait_at_rest(pod.server)  # a result that the engine has told already is in the journal then
        pods.stop(pod.server)
    if falls_in(moment, stage.facts(), known, stage.manifests()):
        return True
    pods.go_on(pod.server)
    pods.go_on(pod.engine)
    return False


def _catch_acceptance(stage: Stage, pod: Pod, known: Collection[Key], go: Callable[[], None]) -> bool:
    """Stop the server right after it wrote that it accepted an operation."""
    pods.stop(pod.server)
    go()
    deadline = time.monotonic() + LONGEST_ACCEPT_SECONDS
    with _in_haste():
        while not news(Moment.ACCEPTED, stage.facts(), known):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was accepted within {LONGEST_ACCEPT_SECONDS:.0f} s")
            pods.run_on(pod.server, STEP_SECONDS)
    if falls_in(Moment.ACCEPTED, stage.facts(), known, ()):
        return True
    pods.go_on(pod.server)
    return False


def _stop_behind_manifest(stage: Stage, pod: Pod, key: Key) -> None:
    """Stop the server right after the manifest of a save got its name.

    The server is stopped while the engine writes the checkpoint, and then goes on by fractions of a millisecond.
    """
    parent = stage.everloop.session.lineage_root / "models" / storage_id(key[0]) / "checkpoints" / "weights"
    deadline = time.monotonic() + LONGEST_SAVE_SECONDS
    pods.stop(pod.server)
    pods.go_on(pod.engine)
    while not any((path / MANIFEST).exists() for path in _of_number(parent, key[1])):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no manifest of {key} within {LONGEST_SAVE_SECONDS:.0f} s")
        pods.run_on(pod.server, STEP_SECONDS)


def _of_number(parent: Path, number: int) -> list[Path]:
    """Directories that an operation's checkpoint may lie in: ``<incarnation>-<number>[.<generation>]``."""
    return [path for path in parent.glob("*") if path.name.partition("-")[2].partition(".")[0] == str(number)]


@contextmanager
def _in_haste() -> Iterator[None]:
    """Go before other processes: who waits for a processor here finds the moment gone."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, HASTE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, own)
