"""Probes of RestClient and AdminClient."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from tinker import types

from tests.conformance.sdk import reasons
from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.serviceclient import check_telemetry
from tests.conformance.sdk.world import EVERY, RANK, World, check, close, done, loss

TTL_SECONDS = 7200


def attempted(call: Callable[[], Any]) -> None:
    """What has to be before a call that is probed, if it can be."""
    with contextlib.suppress(tinker.APIStatusError):
        done(call())


def parts(path: str) -> tuple[str, str]:
    """Run and checkpoint of a path."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return run, checkpoint


@probe("RestClient.get_server_capabilities", "it names the base model that `get_info` names")
def get_server_capabilities(world: World) -> None:
    names = {model.model_name for model in done(world.rest.get_server_capabilities()).supported_models}
    check(world.training.get_info().model_data.model_name in names, f"{names}")


@probe("RestClient.get_training_run", "base model and rank that the run was made with")
def get_training_run(world: World) -> None:
    run = done(world.rest.get_training_run(world.training.model_id))
    check((run.base_model, run.lora_rank, run.corrupted) == (world.base_model, RANK, False), f"{run}")


@probe("RestClient.get_training_run_by_tinker_path", "the run that saved the checkpoint")
def get_training_run_by_tinker_path(world: World) -> None:
    run = done(world.rest.get_training_run_by_tinker_path(world.state))
    check(run.training_run_id == world.training.model_id, f"{run}")


@probe("RestClient.get_weights_info_by_tinker_path", "base model and rank of the run that saved it")
def get_weights_info_by_tinker_path(world: World) -> None:
    info = done(world.rest.get_weights_info_by_tinker_path(world.state))
    check((info.base_model, info.lora_rank) == (world.base_model, RANK), f"{info}")


@probe("RestClient.list_training_runs", "a run is there once it is made")
def list_training_runs(world: World) -> None:
    made = world.fresh().model_id
    listed = {run.training_run_id for run in done(world.rest.list_training_runs(limit=EVERY)).training_runs}
    check(made in listed, "it isn't listed")


@probe("RestClient.list_checkpoints", "a checkpoint is there once it is saved")
def list_checkpoints(world: World) -> None:
    check(world.checkpoint(world.saved()) is not None, "it isn't listed")


@probe("RestClient.list_user_checkpoints", "a checkpoint is there once it is saved")
def list_user_checkpoints(world: World) -> None:
    path = world.saved()
    listed = done(world.rest.list_user_checkpoints(limit=EVERY)).checkpoints
    check(path in {each.tinker_path for each in listed}, "it isn't listed")


@probe("RestClient.get_sampler", "base model and path that the sampler was made from")
def get_sampler(world: World) -> None:
    sampler = done(world.rest.get_sampler(world.sampler._sampling_session_id))
    check((sampler.base_model, sampler.model_path) == (world.base_model, world.weights), f"{sampler}")


@probe("RestClient.delete_checkpoint", "`list_checkpoints` has it no more")
def delete_checkpoint(world: World) -> None:
    path = world.saved()
    done(world.rest.delete_checkpoint(*parts(path)))
    check(world.checkpoint(path) is None, "it is still listed")


@probe("RestClient.delete_checkpoint_from_tinker_path", "`list_checkpoints` has it no more")
def delete_checkpoint_from_tinker_path(world: World) -> None:
    path = world.saved()
    done(world.rest.delete_checkpoint_from_tinker_path(path))
    check(world.checkpoint(path) is None, "it is still listed")


@probe("RestClient.set_checkpoint_ttl_from_tinker_path", "`list_checkpoints` has when it expires")
def set_checkpoint_ttl_from_tinker_path(world: World) -> None:
    path = world.saved()
    done(world.rest.set_checkpoint_ttl_from_tinker_path(path, TTL_SECONDS))
    check_expires(world, path)


def check_expires(world: World, path: str) -> None:
    """That a checkpoint is listed with the time to live that it was given."""
    listed = world.checkpoint(path)
    check(listed is not None and listed.expires_at is not None, "it is listed without a time to expire")
    left = listed.expires_at - datetime.now(UTC)
    check(timedelta() < left <= timedelta(seconds=TTL_SECONDS), f"it expires in {left}")


@probe("RestClient.publish_checkpoint_from_tinker_path", "`list_checkpoints` has it as public")
def publish_checkpoint_from_tinker_path(world: World) -> None:
    path = world.saved()
    done(world.rest.publish_checkpoint_from_tinker_path(path))
    check(world.checkpoint(path).public, "it is listed as private")


@probe("RestClient.unpublish_checkpoint_from_tinker_path", "`list_checkpoints` has it as private again")
def unpublish_checkpoint_from_tinker_path(world: World) -> None:
    path = world.saved()
    attempted(lambda: world.rest.publish_checkpoint_from_tinker_path(path))
    done(world.rest.unpublish_checkpoint_from_tinker_path(path))
    check(not world.checkpoint(path).public, "it is listed as public")


@probe("RestClient.copy_weights", "`forward` of a model that is made of the copy gives the loss saved")
def copy_weights(world: World) -> None:
    copy = done(world.rest.copy_weights(world.state, world.project))
    client = done(world.service.create_training_client_from_state(copy))
    check(close(loss(client), loss(world.training)), "another loss than that of the checkpoint")


@probe("RestClient.get_external_weights_urls", "the files that it names can be fetched")
def get_external_weights_urls(world: World) -> None:
    _fetch(list(done(world.rest.get_external_weights_urls(world.external())).urls.values()))


@probe("RestClient.get_checkpoint_archive_url", "the archive that it names can be fetched")
def get_checkpoint_archive_url(world: World) -> None:
    _fetch([done(world.rest.get_checkpoint_archive_url(*parts(world.weights))).url])


@probe("RestClient.get_checkpoint_archive_url_from_tinker_path", "the archive that it names can be fetched")
def get_checkpoint_archive_url_from_tinker_path(world: World) -> None:
    _fetch([done(world.rest.get_checkpoint_archive_url_from_tinker_path(world.weights)).url])


def _fetch(urls: list[str]) -> None:
    check(bool(urls), "no file is named")
    for url in urls:
        with urllib.request.urlopen(url, timeout=60) as answer:
            check(bool(answer.read(1)), f"{url} is empty")


@probe("RestClient.list_sessions", "this process's session is there")
def list_sessions(world: World) -> None:
    session = world.session
    check(session in done(world.rest.list_sessions(limit=EVERY)).sessions, "it isn't listed")


@probe("RestClient.get_session", "it names the runs of this process")
def get_session(world: World) -> None:
    found = done(world.rest.get_session(world.session))
    check(world.training.model_id in found.training_run_ids, f"{found}")


@probe("RestClient.search_sessions", "this process's session is found by its id")
def search_sessions(world: World) -> None:
    found = done(world.rest.search_sessions(types.SessionSearchRequest(session_id=world.session)))
    check([each.session_id for each in found.sessions] == [world.session], f"{found}")


@probe("RestClient.assign_session_project", "`list_training_runs` of the project has the run", reasons.ACCOUNTS)
def assign_session_project(world: World) -> None:
    done(world.rest.assign_session_project(world.session, "project"))
    runs = done(world.rest.list_training_runs(limit=EVERY, project_id="project")).training_runs
    check(world.training.model_id in {run.training_run_id for run in runs}, "it isn't listed")


@probe("RestClient.export_session_trace", "the trace that it names can be fetched", reasons.TRACES)
def export_session_trace(world: World) -> None:
    _fetch([done(world.rest.export_session_trace(world.session))])


@probe("RestClient.whoami", "it names a user", reasons.ACCOUNTS)
def whoami(world: World) -> None:
    check(bool(done(world.rest.whoami()).user_urn), "nobody")


@probe("RestClient.get_telemetry", "what is logged is taken by the server, which keeps none of it")
def get_telemetry(world: World) -> None:
    check_telemetry(world.rest)


@probe("RestClient.*_async", "`list_checkpoints_async`: as the method of the same name")
def twins(world: World) -> None:
    path = world.saved()
    listed = asyncio.run(world.rest.list_checkpoints_async(world.training.model_id)).checkpoints
    check(path in {each.tinker_path for each in listed}, "it isn't listed")


def _hours() -> tuple[datetime, datetime]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return now - timedelta(hours=1), now


def _audit_log(client: Any) -> None:
    check(bool(done(client.get_audit_log()).entries), "it is empty")


def _billing_usage(client: Any) -> None:
    check(bool(done(client.get_billing_usage(*_hours())).data), "it is empty")


def _storage_usage(client: Any) -> None:
    check(done(client.get_current_checkpoint_storage_usage()) is not None, "nothing")


@probe("RestClient.get_audit_log", "it has entries", reasons.AUDIT)
def get_audit_log(world: World) -> None:
    _audit_log(world.rest)


@probe("RestClient.get_billing_usage", "it has entries", reasons.BILLING)
def get_billing_usage(world: World) -> None:
    _billing_usage(world.rest)


@probe("RestClient.get_current_checkpoint_storage_usage", "it is told", reasons.BILLING)
def get_current_checkpoint_storage_usage(world: World) -> None:
    _storage_usage(world.rest)


@probe("AdminClient.get_audit_log", "it has entries", reasons.AUDIT)
def admin_get_audit_log(world: World) -> None:
    _audit_log(tinker.AdminClient())


@probe("AdminClient.get_billing_usage", "it has entries", reasons.BILLING)
def admin_get_billing_usage(world: World) -> None:
    _billing_usage(tinker.AdminClient())


@probe("AdminClient.get_current_checkpoint_storage_usage", "it is told", reasons.BILLING)
def admin_get_current_checkpoint_storage_usage(world: World) -> None:
    _storage_usage(tinker.AdminClient())


@probe("AdminClient.get_telemetry", "what is logged is taken by the server, which keeps none of it")
def admin_get_telemetry(world: World) -> None:
    check_telemetry(tinker.AdminClient())


@probe("AdminClient.*_async", "`get_audit_log_async`: as the method of the same name", reasons.AUDIT)
def admin_twins(world: World) -> None:
    check(bool(asyncio.run(tinker.AdminClient().get_audit_log_async()).entries), "it is empty")
