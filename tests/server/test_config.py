"""The configuration of a session pod is read strictly, and errors name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop_trainer.config import ConfigError, read_config

GOOD: dict[str, Any] = {
    "format": 1,
    "namespace": "team",
    "name": "qwen",
    "uid": "u-1",
    "attempt": 3,
    "baseModel": {"name": "Qwen/Qwen3-8B", "revision": "abc", "path": "/models/qwen"},
    "engine": {"dtype": "BFloat16", "maxSequenceLength": 4096, "threads": 2, "deterministic": True},
    "adapters": {"maxModels": 4, "maxRank": 64},
    "storage": {"root": "/var/lib/everloop/team/qwen"},
    "snapshots": {"replayBudgetSeconds": 20},
    "tokenFile": "/run/secrets/everloop/token",
}


def environment(**changes: Any) -> dict[str, str]:
    """GOOD with changed top-level fields, as the operator passes it."""
    return {"EVERLOOP_CONFIG": json.dumps(GOOD | changes), "POD_IP": "127.0.0.9", "POD_UID": "p-1"}


def test_reads_what_the_operator_writes() -> None:
    """Every field arrives; optional variables have the defaults of the contract."""
    config = read_config(environment())
    assert config.session.base_model.path == "/models/qwen"
    assert config.session.snapshots.replay_budget_seconds == 20.0
    assert str(config.spare_socket) == "/run/everloop/spare.sock"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attempt": 0}, "attempt"),
        ({"attempt": "3"}, "attempt"),
        ({"format": 2}, "format"),
        ({"namespace": "Team"}, "namespace"),
        ({"engine": GOOD["engine"] | {"dtype": "float32"}}, "engine.dtype"),
        ({"engine": GOOD["engine"] | {"threads": 0}}, "engine.threads"),
        ({"engine": GOOD["engine"] | {"images": {"maxBytes": 0}}}, "engine.images.maxBytes"),
        ({"adapters": {"maxModels": 4, "maxRank": 0}}, "adapters.maxRank"),
        ({"storage": {"root": "relative"}}, "storage.root"),
        ({"snapshots": {"replayBudgetSeconds": -1}}, "snapshots.replayBudgetSeconds"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], field: str) -> None:
    """A wrong type, a value out of range and an unknown field are each refused by name."""
    with pytest.raises(ConfigError) as refused:
        read_config(environment(**changes))
    assert field in str(refused.value)


@pytest.mark.parametrize("name", ["EVERLOOP_CONFIG", "POD_IP", "POD_UID"])
def test_a_missing_variable_is_named(name: str) -> None:
    """Required environment variables are named when they are missing."""
    variables = environment()
    del variables[name]
    with pytest.raises(ConfigError, match=name):
        read_config(variables)


def test_broken_json_is_refused_without_showing_it() -> None:
    """The message says where the JSON breaks and does not repeat its content."""
    with pytest.raises(ConfigError, match="EVERLOOP_CONFIG: not JSON") as refused:
        read_config(environment() | {"EVERLOOP_CONFIG": '{"secret": '})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "0", "-1", "many"])
def test_a_bad_number_of_records_is_named(value: str) -> None:
    """Nothing else than a number from 1 on says when a compaction is due."""
    assert read_config(environment() | {"EVERLOOP_COMPACT_AFTER_RECORDS": "12"}).compact_after_records == 12
    with pytest.raises(ConfigError, match="EVERLOOP_COMPACT_AFTER_RECORDS"):
        read_config(environment() | {"EVERLOOP_COMPACT_AFTER_RECORDS": value})
