"""What can't be served is refused in the SDK's own words, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo.install import BASE_MODEL
from tests.e2e.world import NAMESPACE, Everloop

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cases(everloop: Everloop) -> dict[str, Any]:
    """What ``clients/bad_input.py`` saw, by case."""
    lines = everloop.client("bad_input.py", BASE_MODEL, str(everloop.chunk_datums()))
    return {entry["case"]: entry for entry in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("case", "error", "named"),
    [
        ("unknown base model", "BadRequestError", "base_model"),
        ("rank 0", "RequestFailedError", "rank"),
        ("rank too large", "RequestFailedError", "rank"),
        ("token beyond the vocabulary", "RequestFailedError", "data[0].model_input"),
        ("target beyond the vocabulary", "RequestFailedError", "data[0].loss_fn_inputs.target_tokens"),
        ("length mismatch", "RequestFailedError", "data[0].loss_fn_inputs.target_tokens"),
        ("weights mismatch", "RequestFailedError", "data[0].loss_fn_inputs.weights"),
        ("unknown loss", "RequestFailedError", "loss_fn"),
        ("chunk 0", "RequestFailedError", "target_tokens"),
        ("chunk 1", "RequestFailedError", "target_tokens"),
        ("chunk 2", "RequestFailedError", "target_tokens"),
        ("step beside parts", "RequestFailedError", "accumulation window"),
    ],
)
def test_error_is_the_sdk_s_own_and_names_the_field(cases: dict[str, Any], case: str, error: str, named: str) -> None:
    """Each bad request raises the SDK's error class with the field in its text."""
    assert cases[case]["raised"] == error, cases[case]
    assert named in cases[case]["text"]


def test_unknown_base_model_is_answered_with_near_names(cases: dict[str, Any]) -> None:
    """A typing error is met with the name that was meant."""
    assert BASE_MODEL in cases["unknown base model"]["text"]


@pytest.mark.parametrize("case", ["after chunk 0", "after chunk 1", "after chunk 2", "step after chunks"])
def test_next_good_operation_works(cases: dict[str, Any], case: str) -> None:
    """A failed operation blocks nothing that comes after it."""
    assert cases[case]["raised"] is None, cases[case]


def test_failed_operations_add_nothing_to_the_gradients(cases: dict[str, Any]) -> None:
    """The step after five refused operations gives the very weights of a model that saw none."""
    assert cases["gradients unchanged"]["got"] == cases["gradients unchanged"]["expected"]


def test_wrong_key_is_an_authentication_error(everloop: Everloop) -> None:
    """A key that was never minted is refused as such."""
    (line, *_) = everloop.client("wrong_key.py", BASE_MODEL, key="tml-000000000000-" + "x" * 43)
    assert line.startswith("AuthenticationError")


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.baseModel", {"baseModel": {"name": ""}}),
        ("spec.adapters.maxRank", {"adapters": {"maxRank": 0}}),
        ("spec.engine.dtype", {"engine": {"dtype": "Int8"}}),
        ("spec.storage", {"storage": {"journal": {}}}),
    ],
)
def test_bad_field_is_refused_at_admission(everloop: Everloop, field: str, spec: dict[str, Any]) -> None:
    """``kubectl apply`` of a wrong TrainingSession fails with the field's path."""
    good: dict[str, Any] = {
        "baseModel": {"name": BASE_MODEL, "source": {"claim": {"claimName": "models", "path": "x"}}},
        "storage": {"journal": {"claim": {"claimName": "training"}}},
    }
    manifest = {
        "apiVersion": "everloop.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": "bad", "namespace": NAMESPACE},
        "spec": {**good, **spec},
    }
    with pytest.raises(RuntimeError, match=field.replace(".", r"\.")):
        everloop.session.tools.kube("apply", "-f", "-", stdin=json.dumps(manifest))
