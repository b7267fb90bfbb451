"""What operator and trainer say to each other; neither imports the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.cluster.trainer import TrainerClient
from everloop_operator.core.children import trainer_config
from everloop_operator.core.observed import Session
from everloop_operator.core.volumes import RUN_DIRECTORY
from everloop_operator.loop.ports import Unanswered
from everloop_trainer import exitcodes
from everloop_trainer.config import PORT, read_config
from everloop_trainer.spare import spare_config
from tests.server.pod import TOKEN, Pod

CLAIMS = {
    "baseModel": {"name": "Qwen/Qwen3-8B", "source": {"claim": {"claimName": "models", "path": "qwen3"}}},
    "storage": {"journal": {"claim": {"claimName": "journals"}}},
}
CHANGED = {
    "engine": {
        "dtype": "BFloat16",
        "maxSequenceLength": 4096,
        "threads": 3,
        "images": {"maxBytes": 5000, "maxPixels": 6000},
    },
    "adapters": {"maxModels": 2, "maxRank": 64},
    "snapshots": {"replayBudgetSeconds": 7},
    "checkpoints": {"everySeconds": 90, "keepLast": 4},
}


@pytest.mark.parametrize("changes", [{}, CHANGED])
def test_the_trainer_reads_what_the_operator_writes(changes: dict[str, Any]) -> None:
    """Every field of the resource that concerns the trainer arrives there, and in the spare."""
    spec = TrainingSessionSpec.model_validate(CLAIMS | changes)
    session = Session("team", "qwen", "uid-9", 1, False, spec, TrainingSessionStatus())
    written = json.dumps(trainer_config(session, spec, attempt=4))
    config = read_config(
        {"EVERLOOP_CONFIG": written, "POD_IP": "127.0.0.9", "POD_UID": "p", "EVERLOOP_RUN_DIR": RUN_DIRECTORY}
    )
    read = config.session
    assert (read.namespace, read.name, read.uid, read.attempt) == ("team", "qwen", "uid-9", 4)
    assert (read.adapters.max_models, read.adapters.max_rank) == (spec.adapters.max_models, spec.adapters.max_rank)
    assert read.snapshots.replay_budget_seconds == spec.snapshots.replay_budget_seconds
    assert read.checkpoints.every_seconds == spec.checkpoints.every_seconds
    assert read.checkpoints.keep_last == spec.checkpoints.keep_last
    assert read.storage.root == "/var/lib/everloop/team/qwen"
    spare = spare_config(config)
    assert spare.socket == Path("/run/everloop/spare.sock")
    assert spare.model_path == Path("/models/qwen3")
    assert spare.base_model == "Qwen/Qwen3-8B"
    assert spare.dtype == spec.engine.dtype.lower()
    assert spare.threads == spec.engine.threads
    assert spare.max_sequence_length == spec.engine.max_sequence_length
    assert spare.max_image_bytes == spec.engine.images.max_bytes
    assert spare.max_image_pixels == spec.engine.images.max_pixels
    assert spare.max_rank == spec.adapters.max_rank


def test_both_mean_the_same_port_and_exit_codes() -> None:
    """The operator tells by the exit code of the container why it ended."""
    assert names.TRAINER_PORT == PORT
    assert names.EXIT_FENCED == exitcodes.FENCED
    assert names.EXIT_STORAGE_MISMATCH == exitcodes.STORAGE_MISMATCH
    assert names.EXIT_STORAGE_FAILED == exitcodes.STORAGE_FAILED
    assert names.EXIT_ACCELERATOR_FAILED == exitcodes.ACCELERATOR_FAILED
    assert names.EXIT_BAD_CONFIGURATION == exitcodes.BAD_CONFIGURATION


async def test_the_operator_reads_the_pods_status(pod: Pod) -> None:
    """The operator's own client takes the report of a running pod."""
    client = TrainerClient()
    report = await client.ask(pod.ip, TOKEN)
    await client.close()
    assert report.state == "Serving"
    assert report.incarnation is not None
    assert report.incarnation.attempt == 1


async def test_the_operator_reads_why_the_storage_cannot_be_opened(make_pod: Callable[..., Pod]) -> None:
    """A server that finds its storage damaged says so, in a report that the operator takes, before it ends."""
    pod = make_pod()
    pod.start("server")
    pod.wait_until("Starting")
    pod.kill()
    (pod.root / "identity.json").write_text("{}")
    pod.start("server")
    client = TrainerClient()
    async with asyncio.timeout(30):
        error = ""
        while not error:
            try:
                report = await client.ask(pod.ip, TOKEN)
            except Unanswered:
                continue
            error = report.storage.error
    await client.close()
    assert error.startswith("identity.json: ")
    assert not report.serving
    assert await asyncio.to_thread(pod.container.wait, 30) == exitcodes.STORAGE_FAILED
