"""Says of each thing that the installed SDK offers what becomes of it here: one JSON object a line.

    python -m tests.conformance.sdk BASE_MODEL PROJECT

in an environment that has the SDK; PROJECT is the one that the key's sessions are in. URL and key come from the SDK's
own variables. TORCH names a directory of packages to take torch from, which the SDK expects of its users and does not
bring.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from tests.conformance.sdk import hub

# Behind the SDK's own packages, so that only what these lack is taken from it.
sys.path.append(os.environ["TORCH"])
os.environ["HF_ENDPOINT"] = hub.start()  # is read when the hub's client is imported

import tinker

from tests.conformance.sdk.probing import outcome
from tests.conformance.sdk.surface import sections
from tests.conformance.sdk.world import World

PROBES = ("commands", "options", "parameters", "restclient", "samplingclient", "serviceclient", "trainingclient")


def main(base_model: str, project: str) -> None:
    for name in PROBES:
        importlib.import_module(f"tests.conformance.sdk.{name}")
    world = World(base_model, project)
    for section, rows in sections().items():
        for row in rows:
            told = {"version": tinker.__version__, "section": section, **outcome(row, world)}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1], sys.argv[2])
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135).
        os._exit(code)
