"""The init container that fills the model cache: `EVERLOOP_FETCH` says from where and to where."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import ValidationError

from everloop_trainer import exitcodes
from everloop_trainer.config import ConfigError, FetchConfig
from everloop_trainer.copies.bucket import Place
from everloop_trainer.fetching.cache import fill
from everloop_trainer.fetching.files import FetchFailed, Source
from everloop_trainer.fetching.s3 import S3Source
from everloop_trainer.fetching.telling import telling
from everloop_trainer.logs import configure_logs
from everloop_trainer.termination import give_up

VARIABLE = "EVERLOOP_FETCH"
FAILED = 1
log = structlog.get_logger(__name__)


def run_fetch(environment: Mapping[str, str] = os.environ) -> int:
    """Fills the cache; returns the exit code. A failure is in the log and in the container's termination message."""
    configure_logs("fetch", pod=environment.get("POD_NAME", ""))
    try:
        config = _read(environment.get(VARIABLE, ""))
        with telling(environment) as told:
            fill(Path(config.directory), _source(config), told.tell if told is not None else lambda _: None)
    except ConfigError as error:
        return give_up(exitcodes.BAD_CONFIGURATION, f"BadConfiguration: {error}")
    except (FetchFailed, OSError) as error:
        return give_up(FAILED, f"FetchFailed: {error}")
    return 0


def _read(text: str) -> FetchConfig:
    try:
        json.loads(text)
        return FetchConfig.model_validate_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{VARIABLE}: not JSON: {error.msg} at position {error.pos}") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or '(top)'}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{VARIABLE}: {'; '.join(problems)}") from None


def _source(config: FetchConfig) -> Source:
    if config.s3 is not None:
        s3 = config.s3
        return S3Source(Place(s3.uri, s3.region, s3.endpoint_url, s3.kms_key_id, s3.credentials_dir))
    hub = config.hugging_face
    if hub is None:
        raise ConfigError(f"{VARIABLE}: one of s3 and huggingFace is required")
    # The image forbids the network to everything else; the hub's client reads this when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from everloop_trainer.fetching.hub import HubSource

    return HubSource(hub.repo, hub.revision, _token(hub.token_file))


def _token(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"huggingFace.tokenFile: {error.strerror}: {path}") from None
