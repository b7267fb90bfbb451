"""What is copied and removed, in which order, and what comes back: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everloop_trainer.copies.copier import Work, due, state_of
from everloop_trainer.copies.protocol import State, Wanted
from everloop_trainer.copies.restore import chosen, rolled_back
from everloop_trainer.copies.working import delay
from everloop_trainer.session.ports import Lora, Manifest, Position, StateKind
from everloop_trainer.session.status import BaseModel

A, B = "m-a", "m-b"
SAVED, AUTO = State("weights", A, "1-4"), State("weights", A, "1-8")
OLD, NEW = State("snapshots", A, "1-10"), State("snapshots", A, "1-20")


def work(
    wanted: list[State], present: set[State], taken: dict[str, float] | None = None, **more: set[State]
) -> list[Work]:
    leftovers = more.get("leftovers", set())
    return due(Wanted(tuple(wanted), (A,)), present, leftovers, taken or {}, pause=60, now=100)


def test_what_has_no_copy_is_copied_and_what_has_one_is_left_alone() -> None:
    """The whole set is told again and again; only the difference is worked off."""
    assert work([SAVED, NEW], set()) == [Work(SAVED), Work(NEW)]
    assert work([SAVED, NEW], {SAVED, NEW}) == []


def test_a_snapshot_waits_for_its_turn_and_a_checkpoint_does_not() -> None:
    """Snapshots are taken far more often than they are worth a copy."""
    assert work([SAVED, NEW], set(), {A: 50}) == [Work(SAVED)]
    assert work([SAVED, NEW], set(), {A: 40}) == [Work(SAVED), Work(NEW)]


def test_an_old_snapshot_goes_when_the_new_one_is_there_and_not_before() -> None:
    """There is always one to restore from."""
    assert work([NEW], {OLD}) == [Work(NEW)]
    assert work([NEW], {OLD, NEW}) == [Work(OLD, remove=True)]
    assert work([], {OLD}) == []


def test_a_checkpoint_that_was_pruned_goes_and_so_does_half_of_one() -> None:
    """Also what a killed copier or a zombie left."""
    assert work([SAVED], {SAVED, AUTO}) == [Work(AUTO, remove=True)]
    assert work([SAVED], {SAVED}, leftovers={AUTO}) == [Work(AUTO, remove=True)]


def test_nothing_is_removed_of_a_model_that_is_not_known() -> None:
    """Its history may be what was lost: then the copies are all that is left."""
    assert due(Wanted((), (A,)), {State("weights", B, "1-4")}, set(), {}, 60, 100) == []


@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("models/m-a/snapshots/1-10/manifest.json", OLD),
        ("models/m-a/checkpoints/weights/1-4/state.safetensors", SAVED),
        ("identity.json", None),
        ("models/m-a/else", None),
    ],
)
def test_objects_belong_to_states(path: str, state: State | None) -> None:
    """By their names, which are those of the files."""
    assert state_of(path) == state


def test_the_delay_grows_to_a_minute() -> None:
    """And is none after a success."""
    assert [delay(failures) for failures in (0, 1, 2, 3, 20, 1000)] == [0, 1, 2, 4, 60, 60]


# --- the way back ---------------------------------------------------------------------------------------------------


def manifest(
    kind: StateKind, seq: int, name: str | None = None, incarnation: int = 1, model: str = "s:train:0"
) -> Manifest:
    return Manifest(
        kind=kind,
        key=f"{incarnation}-{seq}",
        model=model,
        operation=f"{model}:{seq}",
        seq=seq,
        step=seq // 2,
        stands_on=Position(incarnation, seq),
        base_model=BaseModel("smol", "r1", "ab" * 32),
        lora=Lora(8, 1, True, True, True),
        alpha=32,
        sha256=f"{seq:064x}",
        size=10,
        time=f"2030-01-01T00:00:{seq:02}Z",
        name=name,
    )


def test_the_newest_snapshot_becomes_a_checkpoint() -> None:
    """By number, never by text; older snapshots stay where they are."""
    saved = manifest("weights", 4, "half")
    states = chosen([manifest("snapshots", 9), manifest("snapshots", 10), saved])
    assert [(each.name, each.seq) for each in states] == [("half", 4), ("restored-5", 10)]


def test_a_snapshot_that_a_checkpoint_covers_is_left() -> None:
    """The checkpoint has a name already."""
    saved = manifest("weights", 10, "auto-5")
    assert chosen([manifest("snapshots", 10), saved]) == [saved]
    assert chosen([manifest("snapshots", 8), saved]) == [saved]


def test_the_name_of_a_restored_snapshot_is_free() -> None:
    """A user may have had the same idea."""
    taken = manifest("weights", 4, "restored-5")
    assert [each.name for each in chosen([taken, manifest("snapshots", 10)])] == ["restored-5", "restored-5-10"]


def test_a_model_is_rolled_back_to_the_newest_that_is_left_of_it() -> None:
    """And says from which checkpoint with an optimizer to go on."""
    half, thin = manifest("weights", 4, "half"), manifest("sampler_weights", 6, "thin")
    [model] = rolled_back([half, thin], "now")
    assert (model.number, model.step, model.resume) == (6, 2, "tinker://s:train:0/weights/half")
    assert [each.name for each in model.checkpoints] == ["half", "thin"]
    assert "rolled back to operation 6 (step 2)" in model.explanation
    assert model.resume in model.explanation
    [without] = rolled_back([replace(thin, model="s:train:1")], "now")
    assert without.resume == ""
    assert "no checkpoint with its optimizer" in without.explanation
