"""The wire schema is the SDK's, taken without importing the SDK."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import everloop_trainer
from everloop_trainer.engine.training import Outcome
from everloop_trainer.tinker_proto import tinker_public


def test_schema_without_the_sdk() -> None:
    """Loading the schema imports neither tinker nor torch nor numpy."""
    program = (
        "import sys; from everloop_trainer.tinker_proto import tinker_public;"
        "print(tinker_public.SampleResponse.DESCRIPTOR.full_name, {'tinker', 'torch', 'numpy'} & set(sys.modules))"
    )
    root = Path(everloop_trainer.__file__).parents[1]
    output = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert output.stdout == "tinker_public.SampleResponse set()\n"


def test_schema_is_that_of_the_sdk() -> None:
    """Both live in one process and read each other's messages."""
    from tinker.proto import tinker_public_pb2

    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    assert tinker_public.ForwardBackwardRequest.FromString(message.SerializeToString()).model_id == "m"
    assert tinker_public.DESCRIPTOR.serialized_pb == tinker_public_pb2.DESCRIPTOR.serialized_pb


def test_the_sdk_reads_an_outcome() -> None:
    """The SDK's own decoder gets every datum's logprobs, in order, and the loss under the key that it needs."""
    from tinker.proto.response_conv import deserialize_forward_backward_output

    logprobs = [np.asarray(values, np.float32) for values in ([-1, -2], [-3], [-4, -5, -6])]
    output = deserialize_forward_backward_output(Outcome(2.5, logprobs).to_proto())
    assert output.metrics == {"loss:sum": 2.5}
    found = [datum["logprobs"] for datum in output.loss_fn_outputs]
    assert [tensor.shape for tensor in found] == [[2], [1], [3]]
    assert [tensor.data for tensor in found] == [values.tolist() for values in logprobs]
