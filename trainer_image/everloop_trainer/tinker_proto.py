"""The wire schema of the tinker SDK, without importing the SDK.

`import tinker` tries to import torch, which costs the server its start within milliseconds; so the generated module
`tinker/proto/tinker_public_pb2.py` is executed from its file. It needs nothing but protobuf.

    from everloop_trainer.tinker_proto import tinker_public
    request = tinker_public.ForwardBackwardRequest.FromString(body)
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_RELATIVE = Path("tinker", "proto", "tinker_public_pb2.py")


def _load() -> Any:
    """Execute the first `tinker/proto/tinker_public_pb2.py` on sys.path; raise ImportError if there is none."""
    for entry in sys.path:
        path = Path(entry, _RELATIVE)
        if path.is_file():
            break
    else:
        raise ImportError(f"{_RELATIVE} is not on sys.path: install the package tinker")
    spec = importlib.util.spec_from_file_location("everloop_trainer._tinker_public_pb2", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tinker_public: Any = _load()
