"""Models with checkpoints, and looking at what is listed of these and what is on the disk."""

from __future__ import annotations

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import Operation, SaveWeights
from everloop_trainer.session.service import SessionService
from tests.session.world import A, B, Running, create, fb, freeze, optim, save

HALF, THIN = f"tinker://{A}/weights/half", f"tinker://{A}/sampler_weights/thin"
OTHER = f"{A.partition(':')[0]}:sample:7"
SAVED: list[list[Operation]] = [
    [create(A), create(B)],
    [fb(A, 1, b"a1"), optim(A, 2)],
    [save(A, 3, "half"), freeze(A, 4, None, "thin")],
]
HOUR = 3600


class Calendar:
    """Wall-clock time as tests say."""

    def __init__(self) -> None:
        self.hour = 0

    def __call__(self) -> str:
        return f"2030-01-{1 + self.hour // 24:02d}T{self.hour % 24:02d}:00:00.000Z"


def kept_for(model: str, seq: int, name: str, seconds: int) -> Operation:
    return Operation(model, seq, SaveWeights(name, ttl_seconds=seconds))


def listed(service: SessionService, model: str = A) -> dict[str, str | None]:
    """When each checkpoint of a model expires, by its path."""
    return {
        str(one.path): one.expires for run in service.runs() if run.info.model_id == model for one in run.checkpoints
    }


def stored(world: Running, model: str = A) -> set[str]:
    """Keys of a model's checkpoints that have files."""
    kinds = ("weights", "sampler_weights", "external_weights")
    return {key for kind in kinds for key in world.files.list(f"models/{storage_id(model)}/checkpoints/{kind}")}


def keys(world: Running, model: str = A) -> set[str]:
    """Keys of a model's checkpoints that are listed."""
    return {one.stored.key for run in world.service.runs() if run.info.model_id == model for one in run.checkpoints}
