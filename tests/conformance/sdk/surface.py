"""What the installed SDK offers its users, found by looking at it: a row for each, in sections."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

import click
import tinker
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces.rest_client import RestClient

WITH_OPTIONS = {
    "SamplingClient.sample": 3,
    "SamplingClient.compute_logprobs": 1,
    "TrainingClient.save_state": 1,
    "TrainingClient.save_weights_for_sampler": 1,
    "TrainingClient.save_weights_and_get_sampling_client": 0,
}
"""Methods whose arguments are rows of their own, but the first so many."""
ASYNC = "_async"


def sections() -> dict[str, list[str]]:
    """Rows by section."""
    clients = {name: getattr(tinker, name) for name in tinker.__all__ if name.endswith("Client")}
    classes = {**clients, "RestClient": RestClient, "APIFuture": tinker.APIFuture}
    found = {name: list(_methods(name, classes[name])) for name in sorted(classes)}
    return found | {
        "Arguments": [
            f"{method}({name})" for method, start in WITH_OPTIONS.items() for name in _options(method, start)
        ],
        "Losses": [f'loss_fn="{name}"' for name in typing.get_args(types.LossFnType)],
        "Parameters": list(_parameters()),
        "Command line": [" ".join(command) for command in _commands(main_cli, ("tinker",))],
    }


def _methods(name: str, client: type) -> Iterator[str]:
    """Methods and properties; an asynchronous twin is the method itself, and one row says how the twins do."""
    public = [each for each in dir(client) if not each.startswith("_")]
    twins = [each for each in public if each.endswith(ASYNC) and each.removesuffix(ASYNC) in public]
    yield from (f"{name}.{each}" for each in public if each not in twins or name == "APIFuture")
    if twins and name != "APIFuture":
        yield f"{name}.*{ASYNC}"


def _options(method: str, start: int) -> list[str]:
    name, _, attribute = method.partition(".")
    return list(inspect.signature(getattr(getattr(tinker, name), attribute)).parameters)[1 + start :]


def _parameters() -> Iterator[str]:
    for name in ("AdamParams", "LoraConfig", "SamplingParams"):
        yield from (f"{name}.{field}" for field in getattr(types, name).model_fields)
    yield from (name for name in tinker.__all__ if name.endswith("OptimizerConfig"))
    yield from (each.__name__ for each in typing.get_args(typing.get_args(types.ModelInputChunk)[0]))


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        yield from _commands(below, (*path, name))
