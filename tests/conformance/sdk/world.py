"""What the probes of one process share: clients, a trained adapter with its checkpoints, and ways to look at them."""

from __future__ import annotations

import functools
import math
from concurrent.futures import Future
from typing import Any

import tinker
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

SECONDS = 120.0
SEED = 7
RANK = 4
EVERY = 100
"""Items asked of a listing: more than there are."""
TEXTS = ([5, 17, 9, 4, 33, 8, 21, 6], [40, 3, 12, 88, 7, 9], [200, 150, 13, 14, 15, 16, 90])
ADAM = types.AdamParams(learning_rate=1e-2)


class NotObserved(Exception):
    """A call ended well and its effect isn't there."""


def check(holds: bool, what: str) -> None:
    """NotObserved with `what` unless `holds`."""
    if not holds:
        raise NotObserved(what)


def close(found: float, expected: float) -> bool:
    """Whether two results are the same up to what float32 rounds away."""
    return math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-4)


def done(value: Any) -> Any:
    """The result of a future of any of the SDK's kinds; older SDKs answer some calls with the result itself."""
    return value.result(timeout=SECONDS) if isinstance(value, tinker.APIFuture | Future) else value


def tensor(values: list[float] | list[int], dtype: str) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def texts() -> list[types.Datum]:
    """Data for cross_entropy."""
    return [datum(text, weights=[1.0] * (len(text) - 1)) for text in TEXTS]


def datum(text: list[int], **inputs: list[float]) -> types.Datum:
    """One text whose every token is a target, and further float inputs of its loss."""
    floats = {name: tensor(values, "float32") for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={"target_tokens": tensor(text[1:], "int64"), **floats},
    )


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints(TEXTS[0])


def loss(client: Any) -> float:
    """Of the texts, under the weights as they are."""
    return float(done(client.forward(texts(), "cross_entropy")).metrics["loss:sum"])


def step(client: Any, adam: types.AdamParams = ADAM) -> None:
    """One step of training on the texts."""
    done(client.forward_backward(texts(), "cross_entropy"))
    done(client.optim_step(adam))


class World:
    """Made on first use, since each row is to be told of even where another fails."""

    def __init__(self, base_model: str, project: str) -> None:
        self.base_model = base_model
        self.project = project
        self._names = 0

    @functools.cached_property
    def service(self) -> Any:
        return tinker.ServiceClient(user_metadata={"purpose": "conformance"})

    @functools.cached_property
    def rest(self) -> RestClient:
        return self.service.create_rest_client()

    @functools.cached_property
    def training(self) -> Any:
        """An adapter after one step, which nobody trains on."""
        client = self.fresh()
        step(client)
        return client

    @functools.cached_property
    def state(self) -> str:
        """Path of its checkpoint."""
        return str(done(self.training.save_state("shared")).path)

    @functools.cached_property
    def weights(self) -> str:
        """Path of its weights for samplers."""
        return str(done(self.training.save_weights_for_sampler("shared")).path)

    @functools.cached_property
    def sampler(self) -> Any:
        """Samples from these weights."""
        return done(self.service.create_sampling_client(model_path=self.weights))

    @functools.cached_property
    def loss_after_two_steps(self) -> float:
        client = self.fresh()
        step(client)
        step(client)
        return loss(client)

    @property
    def session(self) -> str:
        return str(self.training.model_id).split(":")[0]

    def fresh(self, **options: Any) -> Any:
        """A new adapter."""
        options = {"rank": RANK, "seed": SEED, **options}
        return done(self.service.create_lora_training_client(self.base_model, **options))

    def saved(self) -> str:
        """Path of a new checkpoint."""
        self._names += 1
        return str(done(self.training.save_state(f"saved-{self._names}")).path)

    def external(self) -> str:
        """Path of new external weights."""
        self._names += 1
        return str(done(self.training.save_weights_external(f"external-{self._names}")).path)

    def checkpoint(self, path: str) -> Any:
        """How a listing shows a checkpoint, None where it doesn't."""
        run = path.removeprefix("tinker://").split("/")[0]
        listed = done(self.rest.list_checkpoints(run)).checkpoints
        return next((each for each in listed if each.tinker_path == path), None)

    def check_samples_from(self, sampler: Any, client: Any) -> None:
        """That a sampler has the weights of an adapter, by what each says of the same text."""
        found = done(sampler.compute_logprobs(prompt()))[1:]
        output = done(client.forward([datum(TEXTS[0], weights=[1.0] * (len(TEXTS[0]) - 1))], "cross_entropy"))
        expected = output.loss_fn_outputs[0]["logprobs"].data
        same = all(close(one, other) for one, other in zip(found, expected, strict=True))
        check(same, f"log-probabilities {found} instead of {expected}")
