"""Probes of the SDK's command line, run as its own program runs it but in this process."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.lib.credentials import JsonCredentialStore, ManualKey, default_credentials_path

from tests.conformance.sdk import hub, reasons
from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.restclient import TTL_SECONDS, attempted, check_expires, parts
from tests.conformance.sdk.world import RANK, World, check

KEY = "tml-another"


def run(*arguments: str, given: str | None = None) -> str:
    """What a command prints; raises what the command shows to its user as an error."""
    ended = CliRunner().invoke(main_cli, ["--format", "json", *arguments], input=given)
    if isinstance(ended.exception, Exception):
        raise ended.exception
    if ended.exit_code != 0:
        raise RuntimeError(ended.output)
    return str(ended.stdout)


def told(*arguments: str) -> Any:
    """The JSON document that a command prints."""
    return json.loads(run(*arguments))


@probe("tinker version", "it prints the version of the package")
def version(world: World) -> None:
    check(tinker.__version__ in run("version"), run("version"))


@probe("tinker auth status", "it says that the server is accessible")
def auth_status(world: World) -> None:
    check("accessible: yes" in run("auth", "status"), run("auth", "status"))


@probe("tinker auth login", "the key that was pasted is stored", reasons.LOGIN)
def auth_login(world: World) -> None:
    run("auth", "login", given=f"{KEY}\n")
    check(JsonCredentialStore(default_credentials_path()).get_default_key() is not None, "nothing is stored")


@probe("tinker auth logout", "the key stored on this machine is gone; on the server it stays")
def auth_logout(world: World) -> None:
    store = JsonCredentialStore(default_credentials_path())
    store.add_key("1", ManualKey(key=KEY, name="conformance"))
    store.set_default("1")
    run("auth", "logout")
    check(JsonCredentialStore(default_credentials_path()).get_default_key() is None, "it is still there")


@probe("tinker auth whoami", "it names a user", reasons.ACCOUNTS)
def auth_whoami(world: World) -> None:
    check(bool(told("auth", "whoami")["user_urn"]), "nobody")


@probe("tinker billing usage", "it has entries", reasons.BILLING)
def billing_usage(world: World) -> None:
    day = datetime.now(UTC).date().isoformat()
    check(bool(told("billing", "usage", f"{day}T00:00:00Z", f"{day}T01:00:00Z")), "it is empty")


@probe("tinker billing checkpoint-storage", "it has entries", reasons.BILLING)
def billing_checkpoint_storage(world: World) -> None:
    check(bool(told("billing", "checkpoint-storage")), "it is empty")


@probe("tinker model list", "it has the base model that `get_info` names")
def model_list(world: World) -> None:
    check(world.training.get_info().model_data.model_name in run("model", "list"), run("model", "list"))


@probe("tinker run list", "a run is there once it is made")
def run_list(world: World) -> None:
    made = world.fresh().model_id
    check(made in run("run", "list", "--limit", "0"), "it isn't listed")


@probe("tinker run info", "base model and rank that the run was made with")
def run_info(world: World) -> None:
    found = told("run", "info", world.training.model_id)
    check((found["base_model"], found["lora_rank"]) == (world.base_model, RANK), f"{found}")


@probe("tinker checkpoint list", "a checkpoint is there once it is saved")
def checkpoint_list(world: World) -> None:
    path = world.saved()
    listed = told("checkpoint", "list", "--run-id", parts(path)[0])["checkpoints"]
    check(path in {each["tinker_path"] for each in listed}, "it isn't listed")


@probe("tinker checkpoint info", "path and rank of what was saved")
def checkpoint_info(world: World) -> None:
    found = told("checkpoint", "info", world.state)
    check((found["tinker_path"], found["lora_rank"]) == (world.state, RANK), f"{found}")


@probe("tinker checkpoint delete", "`list_checkpoints` has it no more")
def checkpoint_delete(world: World) -> None:
    path = world.saved()
    answer = told("checkpoint", "delete", "--yes", path)
    if answer["failed"]:
        raise RuntimeError(answer["failed"][0]["error"])
    check(world.checkpoint(path) is None, "it is still listed")


@probe("tinker checkpoint set-ttl", "`list_checkpoints` has when it expires")
def checkpoint_set_ttl(world: World) -> None:
    path = world.saved()
    run("checkpoint", "set-ttl", path, "--ttl", str(TTL_SECONDS))
    check_expires(world, path)


@probe("tinker checkpoint publish", "`list_checkpoints` has it as public")
def checkpoint_publish(world: World) -> None:
    path = world.saved()
    run("checkpoint", "publish", path)
    check(world.checkpoint(path).public, "it is listed as private")


@probe("tinker checkpoint unpublish", "`list_checkpoints` has it as private again")
def checkpoint_unpublish(world: World) -> None:
    path = world.saved()
    attempted(lambda: world.rest.publish_checkpoint_from_tinker_path(path))
    run("checkpoint", "unpublish", path)
    check(not world.checkpoint(path).public, "it is listed as public")


@probe("tinker checkpoint download", "the adapter's files are there")
def checkpoint_download(world: World) -> None:
    target = Path.cwd() / "downloaded"
    run("checkpoint", "download", world.state, "--output", str(target))
    check(any(target.glob("*/adapter_config.json")), f"{list(target.glob('*/*'))}")


@probe("tinker checkpoint push-hf", "the hub has the adapter's files")
def checkpoint_push_hf(world: World) -> None:
    run("checkpoint", "push-hf", world.state)
    check({"adapter_config.json", "adapter_model.safetensors"} <= hub.COMMITTED, f"{hub.COMMITTED}")


@probe("tinker session export-trace", "a trace is written", reasons.TRACES)
def session_export_trace(world: World) -> None:
    target = Path.cwd() / "trace"
    run("session", "export-trace", world.session, "--output", str(target))
    check(target.is_file(), "no trace")
