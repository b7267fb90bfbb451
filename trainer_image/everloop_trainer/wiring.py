"""Puts the parts of the server together: store, session and engine client."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from everloop_http.resources import allow_all_connections
from everloop_trainer import exitcodes
from everloop_trainer.adjusted import Adjusted
from everloop_trainer.basefiles import remembered_files_sha256
from everloop_trainer.config import PORT, ConfigError, TrainerConfig, read_config
from everloop_trainer.copies.client import CopierProcess, restore_if_empty
from everloop_trainer.logs import configure_logs
from everloop_trainer.server.engine_client import SpareSocket
from everloop_trainer.server.process import serve
from everloop_trainer.session.errors import Fenced, JournalDamaged, StorageFailed, StorageMismatch
from everloop_trainer.session.ports import Journal
from everloop_trainer.session.service import SessionConfig, SessionService
from everloop_trainer.session.status import BaseModel
from everloop_trainer.store.compacting import LIMITS
from everloop_trainer.store.dump import dump
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.opening import Claimant, open_store
from everloop_trainer.termination import give_up

_log = structlog.get_logger(__name__)


def run_server() -> int:
    """The server process; returns its exit code (`exitcodes`)."""
    try:
        config = read_config()
        token = _read_token(Path(config.session.token_file))
    except ConfigError as error:
        configure_logs("server")
        return give_up(exitcodes.BAD_CONFIGURATION, f"BadConfiguration: {error}")
    session = config.session
    configure_logs("server", session=f"{session.namespace}/{session.name}", pod=config.pod_name)
    allow_all_connections()
    try:
        serving = serve(
            config.pod_ip,
            PORT,
            token,
            config.pod_uid,
            lambda begun: open_session(config, begun),
            config.grace_seconds,
        )
        return asyncio.run(serving)
    except Fenced as error:
        return give_up(exitcodes.FENCED, f"Fenced: {error}")
    except StorageFailed as error:
        _log.error("storage failed", reason=str(error))
        return exitcodes.STORAGE_FAILED
    except StorageMismatch as error:
        return give_up(exitcodes.STORAGE_MISMATCH, f"StorageMismatch: {error}")


async def open_session(config: TrainerConfig, begun: Callable[[Journal], None]) -> SessionService:
    """Claims the storage and takes over its history; `begun` as in `open_store`.

    Raises:
        Fenced: this pod is superseded.
        StorageMismatch: the storage belongs to another base model.
        StorageFailed: storage or base model cannot be read.
    """
    wanted = config.session.base_model
    memory = Path(config.run_dir) / "base-files.json"
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        files_sha256 = await asyncio.to_thread(remembered_files_sha256, Path(wanted.path), memory)
    except OSError as error:
        raise StorageFailed(f"base model: {error}") from error
    base = BaseModel(wanted.name, wanted.revision, files_sha256, frozenset(wanted.aliases))
    claimant = Claimant(
        namespace=config.session.namespace,
        name=config.session.name,
        base_model=base,
        attempt=config.session.attempt,
        pod_uid=config.pod_uid,
    )
    adjusted = Adjusted(Path(config.run_dir) / "settings.json")
    try:
        checkpoints = adjusted.checkpoints(config.session.checkpoints)
    except OSError as error:
        raise StorageFailed(f"the pod's own directory: {error}") from error
    root = Path(config.session.storage.root)
    if config.session.copies is not None:
        await restore_if_empty(root)
    records = config.compact_after_records
    limits = LIMITS if records is None else replace(LIMITS, records=records)
    store = await open_store(PosixFiles(root), claimant, _now(), limits=limits, begun=begun)
    settings = SessionConfig(
        incarnation=store.incarnation,
        previous=store.previous,
        lineage=store.lineage,
        base_model=base,
        max_models=config.session.adapters.max_models,
        max_rank=config.session.adapters.max_rank,
        checkpoints=checkpoints,
        remember=adjusted.remember,
        replay_budget=config.session.snapshots.replay_budget_seconds,
    )
    engines = SpareSocket(config.spare_socket, wanted.name, files_sha256)
    return SessionService(
        settings,
        store.journal,
        store.states,
        engines,
        store.base,
        store.history,
        store.compactor,
        None if config.session.copies is None else CopierProcess(store.incarnation.number),
        store.restored,
    )


def print_journal(root: str) -> int:
    """Prints every record of the history below `root` as JSON lines; returns 1 if nothing can be read there."""
    try:
        for record in dump(Path(root)):
            sys.stdout.write(json.dumps(record) + "\n")
    except (OSError, JournalDamaged) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"tokenFile: {error.strerror}: {path}") from None
    if not token:
        raise ConfigError(f"tokenFile: {path} is empty")
    return token


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
