"""Bodies of requests as a client might send them that is no SDK: right ones, and those with something wrong in them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]
Place = tuple[str | int, ...]

NUMBER = "@number@"
"""In the place of an operation's number, which is not known before it is sent."""
_RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "9" * 4000,
    "9" * 5000,
    "-0",
    "1.0",
    r'"\ud800"',
    r'"\u0000"',
    '{"a": 1, "a": 2}',
    "[" * 90 + "]" * 90,
    "[" * 300 + "]" * 300,
    "[" * 2000 + "]" * 2000,
    '["x"' + ',"x"' * 2000 + "]",
    '{"a":' * 400 + "1" + "}" * 400,
    "1 1",
    "'a'",
)
"""What no JSON value of Python is written as."""
JUNK: tuple[Any, ...] = (
    *(f"@{index}@" for index in range(len(_RAW))),
    *(None, True, False, -1, 0, 1, 8, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**18, 10**30, 10**400),
    *(0.5, -1e308, 5e-324, "", "8", "true", "x" * 5000, "../../etc/passwd", "a\r\nb: c", "\ufeff", "\U0001f600"),
    *([], {}, [[]], {"type": "image"}, {"type": None}, ["a", 1], [True], [320], [-1], [2**31] * 3),
)


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Every value within a body, outermost first."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*here, key)
        yield from places(each, (*here, key))


def text(body: Any) -> str:
    """A body as JSON text."""
    written = json.dumps(body)
    return re.sub(r'"@(\d+)@"', lambda match: _RAW[int(match[1])], written)


@st.composite
def broken(draw: Callable[..., Any], valid: Body) -> str:
    """The text of a body with one to three things wrong, or merely odd, in it."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(body)) or [("new",)]))
        inner = body
        for key in place[:-1]:
            inner = inner[key]
        match draw(st.sampled_from(("junk", "junk", "junk", "gone", "new"))):
            case "junk":
                inner[place[-1]] = copy.deepcopy(draw(st.sampled_from(JUNK)))
            case "gone" if body:
                del inner[place[-1]]
            case "new":
                body["of_tomorrow"] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    written = text(body)
    match draw(st.sampled_from(("", "", "", "", "twice", "cut", "flat"))):
        case "twice":
            name = draw(st.sampled_from(sorted(valid)))
            return f"{{{json.dumps(name)}: {text(draw(st.sampled_from(JUNK)))}, {written[1:]}"
        case "cut":
            return written[: draw(st.integers(0, len(written)))]
        case "flat":
            return text(draw(st.sampled_from(JUNK)))
    return written


def of_model(model: str) -> dict[str, Body]:
    """Right bodies of a model's operations, by endpoint; the number is still to be filled in."""
    address = {"model_id": model, "seq_id": NUMBER}
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    metadata = {"user_metadata": {"a": "b"}, "ttl_seconds": 3600}
    return {
        "optim_step": {**address, "adam_params": adam, "type": "optim_step"},
        "save_weights": {**address, **metadata, "path": "a", "overwrite": True, "type": "save_weights"},
        "save_weights_for_sampler": {**address, **metadata, "path": "a", "kind": "snapshot"},
        "save_weights_external": {**address, "path": "a"},
        "load_weights": {**address, "path": f"tinker://{model}/weights/a", "optimizer": True},
    }


def of_sampler(sampler: str) -> dict[str, Body]:
    """A right sample with all that can be asked for; the number is still to be filled in."""
    params = {"max_tokens": 3, "seed": 5, "stop": [7], "temperature": 0.7, "top_k": 40, "top_p": 0.9}
    targets = {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}
    scores = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 1}
    return {
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": NUMBER,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"tokens": [7, 8]}]},
            "sampling_params": params,
            "topk_sample_logprobs": 2,
            "target_prompt_logprobs": targets,
            **scores,
        }
    }


def of_session(session: str, base_model: str) -> dict[str, Body]:
    """Right bodies of the calls that make a model, by endpoint."""
    model = {"session_id": session, "model_seq_id": NUMBER, "user_metadata": {"a": {"b": [1]}}}
    lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    return {
        "create_model": {
            **model,
            "base_model": base_model,
            "lora_config": lora,
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        },
        "load_weights": {**model, "path": f"tinker://{session}:train:0/weights/a", "optimizer": False},
    }


def questions(model: str, sampler: str) -> dict[str, Body]:
    """Right bodies of calls that change nothing, by endpoint; none of them waits."""
    return {
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/none"},
        "retrieve_future": {"request_id": f"{model}:0", "allow_metadata_only": True},
        "cancel_future": {"request_id": f"{sampler}:0"},
    }
