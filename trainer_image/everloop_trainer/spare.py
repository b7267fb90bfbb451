"""The spare's role: from the pod's configuration to a process that holds the base model and forks engines."""

from __future__ import annotations

from pathlib import Path

import structlog

from everloop_trainer.config import ConfigError, TrainerConfig, read_config
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.spare import run_spare
from everloop_trainer.exitcodes import BAD_CONFIGURATION
from everloop_trainer.logs import configure_logs


def main() -> int:
    """The spare process; serves until SIGTERM."""
    try:
        config = read_config()
    except ConfigError as error:
        configure_logs("spare")
        structlog.get_logger(__name__).error("giving up", reason=str(error))
        return BAD_CONFIGURATION
    session = config.session
    configure_logs("spare", session=f"{session.namespace}/{session.name}", pod=config.pod_name)
    return run_spare(spare_config(config))


def spare_config(config: TrainerConfig) -> SpareConfig:
    """What the engine package is told of the pod's configuration."""
    session = config.session
    return SpareConfig(
        socket=config.spare_socket,
        model_path=Path(session.base_model.path),
        base_model=session.base_model.name,
        dtype="bfloat16" if session.engine.dtype == "BFloat16" else "float32",
        threads=session.engine.threads,
        max_rank=session.adapters.max_rank,
        max_sequence_length=session.engine.max_sequence_length,
        max_image_bytes=session.engine.images.max_bytes,
        max_image_pixels=session.engine.images.max_pixels,
    )
