"""Graphs that nobody traced: whatever they ask for, the engine answers, and takes no memory for it."""

from __future__ import annotations

import os
import resource
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from everloop_losses.graph import GraphError, read
from everloop_losses.operations import ATTRIBUTES, CONSTANTS, FUNCTIONS, METHODS
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.traced import MAX_VALUES, Evaluation

SEED = int(os.environ.get("SEED", "20261130"))
EXAMPLES = int(os.environ.get("EXAMPLES", "400"))
INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}, {"name": "table", "rank": 2}]
NUMBERS = st.sampled_from(
    [0, 1, 2, -1, 3, 7, 64, 1025, 10**5, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 0.5, -2.0, 1e30]
)
KEYWORDS = ("dim", "keepdim", "dtype", "device", "size", "value", "min", "max", "n", "k", "rounding_mode", "reduction")
REFS = st.builds(lambda index: {"ref": index}, st.integers(0, 20))
"""By number; of those that there are."""
CONSTANT = st.sampled_from([{kind: name} for kind, names in CONSTANTS.items() for name in sorted(names)])
SCALAR = st.one_of(REFS, NUMBERS, st.sampled_from([True, False, None, {"float": "nan"}]), CONSTANT)
SLICE = st.builds(lambda *parts: {"slice": list(parts)}, *[st.one_of(st.none(), NUMBERS, REFS)] * 3)
TUPLE = st.builds(lambda parts: {"tuple": parts}, st.lists(st.one_of(SCALAR, SLICE), max_size=3))
ARGUMENT = st.one_of(REFS, REFS, SCALAR, st.lists(SCALAR, max_size=3), TUPLE, SLICE)
CALLS = st.tuples(
    st.sampled_from(
        [("call_method", name) for name in sorted(METHODS)] + [("call_function", n) for n in sorted(FUNCTIONS)]
    ),
    REFS,
    st.one_of(st.just([]), st.lists(ARGUMENT, max_size=3)),
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(KEYWORDS), ARGUMENT, max_size=1)),
    st.sampled_from(sorted(ATTRIBUTES)),
)
GRAPHS = st.lists(CALLS, min_size=1, max_size=8)


def nodes_of(calls: list[Any]) -> list[dict[str, Any]]:
    """Calls of the closed set, each of which may use those before it; the loss is a sum beside them."""
    known = [each["name"] for each in INPUTS]
    nodes = [{"op": "placeholder", "name": name, "target": name} for name in known]

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(each) for each in value]
        if isinstance(value, dict):
            return {key: known[each % len(known)] if key == "ref" else named(each) for key, each in value.items()}
        return value

    for index, ((op, target), tensor, args, kwargs, attribute) in enumerate(calls):
        given, options = ([attribute], {}) if target == "getattr" else (named(args), named(kwargs))
        node = {"op": op, "name": f"n{index}", "target": target, "args": [named(tensor), *given], "kwargs": options}
        nodes.append(node)
        known.append(f"n{index}")
    nodes.append({"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]})
    output = {"tuple": [{"ref": "total"}, {"dict": {"custom/total:mean": {"ref": "total"}}}]}
    return [*nodes, {"op": "output", "name": "output", "target": "output", "args": [output]}]


@pytest.mark.filterwarnings("ignore")
def test_no_graph_does_harm() -> None:
    """Each is refused, fails by its node or gives a number; the process lives and stays small."""
    print(f"SEED={SEED} EXAMPLES={EXAMPLES}")
    inputs = [np.linspace(-1, 1, 6, dtype=np.float32), np.ones((6, 3), np.float32)]
    seen = {"refused": 0, "failed": 0, "ran": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(GRAPHS)
    def each(calls: list[Any]) -> None:
        note(f"seed {SEED}")
        try:
            loss = read("hostile", INPUTS, {"format": 1, "nodes": nodes_of(calls)})
        except GraphError:
            seen["refused"] += 1
            return
        try:
            with torch.enable_grad():
                told = Evaluation(loss).run("data[0]", -torch.ones(6), inputs)
        except ContentError:
            seen["failed"] += 1
        else:
            assert told.slope is not None
            seen["ran"] += 1

    each()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(seen, f"grown by {grown >> 20} MiB")
    assert min(seen.values()) > 0
    assert grown < 24 * MAX_VALUES  # values of 8 bytes, their gradients, and what an operation needs beside
