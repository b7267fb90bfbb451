"""A user's program that samples and trains on what it sampled, by each loss, and by one of its own.

Run like sdk_loop.py, by an interpreter that has torch beside the SDK: it differentiates its own loss.
"""

from __future__ import annotations

from typing import Any

import tinker
import torch
from tinker import types

from tests.server.sdk_loop import BASE_MODEL, batch, run_scenario, say

OPTIONS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {},
    "cispo": {},
    "dro": {"beta": 0.05},
    "gspo": {},
    "stable_reinforce": {"kl_coeff": 0.1},
}


def datum(prompt: list[int], sequence: Any, advantage: float, loss_fn: str) -> types.Datum:
    """A completion with the log-probabilities that it was sampled with, padded over its prompt."""
    before = len(prompt) - 1
    tokens = [*prompt, *sequence.tokens]
    inputs: dict[str, Any] = {
        "target_tokens": torch.tensor(tokens[1:]),
        "logprobs": torch.tensor([0.0] * before + list(sequence.logprobs)),
        "advantages": torch.tensor([0.0] * before + [advantage] * len(sequence.tokens)),
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (torch.arange(len(tokens) - 1) >= before).float()
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def policy_gradients() -> None:
    """At the weights that it was sampled from, each ratio is 1; a step makes what was good likelier."""
    service = tinker.ServiceClient()
    prompt = [5, 6, 7, 8]
    for loss_fn, options in OPTIONS.items():
        client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
        client.forward_backward(batch(0, 3, 16), "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        recording = loss_fn == "stable_reinforce"
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=recording).result()
        params = types.SamplingParams(max_tokens=6, seed=11, temperature=0.8, stop=[])
        good, bad = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result().sequences
        data = [datum(prompt, good, 1.0, loss_fn), datum(prompt, bad, -0.5, loss_fn)]
        if loss_fn == "dro":  # its penalty is for prompts, too
            now = client.forward(data, loss_fn, options).result().loss_fn_outputs
            for each, output in zip(data, now, strict=True):
                each.loss_fn_inputs["logprobs"] = output["logprobs"]
        first = client.forward_backward(data, loss_fn, options).result()
        far = max(
            abs(ours - theirs)
            for sequence, output in zip((good, bad), first.loss_fn_outputs, strict=True)
            for ours, theirs in zip(sequence.logprobs or [], output["logprobs"].data[len(prompt) - 1 :], strict=True)
        )
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        after = client.forward(data, loss_fn, options).result()
        logprobs = [
            [sum(output["logprobs"].data[len(prompt) - 1 :]) for output in result.loss_fn_outputs]
            for result in (first, after)
        ]
        loss, named = first.metrics.pop("loss:sum"), sorted(first.metrics)
        say(event="trained", loss_fn=loss_fn, loss=loss, far=far, logprobs=logprobs, named=named)
    say(event="done")


def own_loss() -> None:
    """A loss of the client's own equals the built-in one that it imitates, step by step."""
    service = tinker.ServiceClient()

    def mine(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [torch.tensor(each.loss_fn_inputs["weights"].data) for each in data]
        loss = -torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)]).sum()
        return loss, {"mine": float(loss)}

    built_in = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    custom = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    for step in range(3):
        data = batch(step, 3, 16)
        expected = built_in.forward_backward(data, "cross_entropy")
        found = custom.forward_backward_custom(data, mine)
        for client in (built_in, custom):
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        say(event="step", built_in=expected.result().metrics["loss:sum"], custom=found.result().metrics["mine"])
    say(event="done")


def clipped(logprobs: Any, weights: Any) -> Any:
    """A loss whose slope depends on what the model gives, with metrics of both kinds."""
    ratio = torch.exp(logprobs + 6)
    loss = -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).sum() - 0.1 * (logprobs * weights).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/weights:sum": weights.sum()}


def by_hand(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The same, as a plain function, for the client to run."""
    told = [clipped(p, each.loss_fn_inputs["weights"].to_torch()) for each, p in zip(data, logprobs, strict=True)]
    means = sum(float(each["custom/ratio:mean"].detach()) for _, each in told) / len(data)
    sums = sum(float(each["custom/weights:sum"]) for _, each in told)
    return torch.stack([loss for loss, _ in told]).sum(), {"custom/ratio:mean": means, "custom/weights:sum": sums}


def traced_loss() -> None:
    """The same loss on the server and in the client, step by step; between two steps somebody may say something."""
    service = tinker.ServiceClient()
    handle = service.create_custom_loss(clipped, {"logprobs": 1, "weights": 1}).result()
    models = [service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result() for _ in range(2)]
    say(event="created", uploaded=handle.loss_id is not None)
    for step in range(4):
        data = batch(step, 3, 16)
        found = [
            model.forward_backward_custom(data, loss) for model, loss in zip(models, (handle, by_hand), strict=True)
        ]
        for model in models:
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        server, client = (each.result() for each in found)
        after = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in models]
        say(event="step", server=server.metrics, client=client.metrics, after=after)
    other = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    try:
        other.forward_backward(batch(0, 1, 16), "custom", {"loss_id": handle.loss_id}).result()
    except tinker.RequestFailedError as error:
        say(event="refused", error=str(error))
    say(event="done")


if __name__ == "__main__":
    run_scenario(policy_gradients=policy_gradients, own_loss=own_loss, traced_loss=traced_loss)
