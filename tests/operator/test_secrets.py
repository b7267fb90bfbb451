"""No value of a Secret is seen anywhere but in Secrets."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import names
from tests.operator.faults.journeys import JobJourney, Journey
from tests.operator.world import RELEASE, SESSIONS, Api, Operator, World

PUBLIC = ("namespace", "subject", "session", "checkpoint", "expires")
"""What the Secret of an API key holds beside its hash."""
SHOWN = ("pods", "events", "configmaps", "persistentvolumeclaims")

pytestmark = pytest.mark.slow


def values(api: Api, namespace: str) -> dict[str, str]:
    """Every value in the Secrets of a namespace that is secret and not empty."""
    return {
        f"{item['metadata']['name']}.{field}": base64.b64decode(text).decode()
        for item in api.items(f"/api/v1/namespaces/{namespace}/secrets")
        for field, text in (item.get("data") or {}).items()
        if text and field not in PUBLIC
    }


def shown(api: Api, namespace: str) -> dict[str, Any]:
    """What whoever may not read Secrets can read."""
    paths = [f"/api/v1/namespaces/{namespace}/{plural}" for plural in SHOWN]
    paths += [f"{SESSIONS}/namespaces/{namespace}/{plural}" for plural in ("trainingsessions", "rljobs")]
    return {path: api.items(path) for path in paths}


@pytest.mark.parametrize(
    ("journey", "held"),
    [
        (Journey, {"tuned-a2-token.token"}),
        (JobJourney, {"poems-a2-token.token", "poems-driver-a2.token", f"poems-driver-a2.{names.API_KEY_FIELD}"}),
    ],
    ids=["session", "job"],
)
def test_no_secret_is_told(world: World, operator: Operator, journey: type[Journey], held: set[str]) -> None:
    """Tokens and keys of a run with a lost node: not in logs, events, statuses, pods, arguments or environments."""
    journey(world).run()
    secrets = values(world.api, world.namespace) | values(world.api, RELEASE)
    assert set(secrets) >= {*held, f"{names.MASTER_KEY_SECRET}.{names.MASTER_KEY_FIELD}"}
    told = {path: json.dumps(found) for path, found in shown(world.api, world.namespace).items()}
    told["the operator's log"] = operator.log.read_text()
    for file in ("cmdline", "environ"):
        told[f"the operator's {file}"] = Path(f"/proc/{operator.pid}/{file}").read_bytes().decode()
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in secrets.items()}
    found = [
        (name, place)
        for place, text in told.items()
        for name, value in secrets.items()
        if value in text or encoded[name] in text
    ]
    assert found == []
