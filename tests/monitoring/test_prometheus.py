"""A real Prometheus reads operator and gateway, and is asked what the dashboard and the alerts ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from monitoring.alerts import ALERTS
from monitoring.panels import INTERVAL, ROWS, Query
from tests.monitoring.stack import RULE, Stack, started
from tests.networks import new_address
from tests.operator.world import eventually, stamp
from tests.server import tinymodel
from tests.server.pod import Pod
from tests.server.wire import Wire, texts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
PANELS = {panel.title: panel for row in ROWS for panel in row.panels}
MOVED: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("Goodput", 0, {}),
    ("Operations", 0, {"kind": "optim_step"}),
    ("Waiting operations", 0, {}),
    ("Where the time of steps goes", 0, {"part": "backward"}),
    ("Tokens", 0, {"kind": "sampled"}),
    ("Tokens by key", 0, {"key": "0123456789ab"}),
    ("Replay", 0, {}),
    ("Interruptions", 0, {"reason": "NodeHealth"}),
    ("Length of recoveries", 0, {}),
    ("Length of recoveries", 1, {}),
    ("Operations in recoveries", 0, {}),
    ("Signals", 0, {"rule": "xid"}),
    ("Moves", 0, {"rule": "xid"}),
    ("Nodes to leave", 0, {}),
    ("Answers", 0, {"code": "401"}),
)
"""Panels, their queries and series that rise by what the test does."""
EMPTY = {"In need of help"}
"""Panels that are empty while all is well."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(tmp_path_factory.mktemp("monitoring")) as stack:
        yield stack


def work(count: int, useful: str, replay: str) -> dict[str, object]:
    """What a trainer says of its work."""
    operations = [{"kind": "optim_step", "outcome": "succeeded", "count": count}]
    seconds = dict.fromkeys(("wait", "forward", "backward", "optimizer", "journal"), useful)
    tokens = [{"model": "base", "key": "0123456789ab", "kind": "sampled", "count": count}]
    figures = {"usefulSeconds": useful, "replaySeconds": replay, "stepSeconds": seconds, "tokens": tokens}
    return {"operations": operations, **figures}


def expression(query: Query) -> str:
    """As Grafana sends it."""
    return query.expression.replace(INTERVAL, "20s")


def ask(stack: Stack, title: str, number: int, labels: dict[str, str]) -> float:
    return sum(stack.values(expression(PANELS[title].queries[number]), labels))


def risen(stack: Stack, title: str, number: int, labels: dict[str, str]) -> bool:
    """Whether the series are above 0; on the way another call is refused, since a rate needs two values."""
    refused = httpx.post(f"{stack.gateway}/api/v1/client/config", headers={"X-API-Key": "tml-x"}, trust_env=False)
    assert refused.status_code == 401
    return ask(stack, title, number, labels) > 0


@pytest.mark.slow
def test_panels_move_when_a_session_leaves_an_ill_node(stack: Stack) -> None:
    """Every query is answered; those that tell of the recovery rise by it, and no other panel is left empty."""
    world = stack.world
    first, second = world.node("a"), world.node("b")
    world.create_session(workers={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    world.run_pod("tuned-a1-0", first, lastSnapshotTime=stamp(), work=work(7, "5", "0"))
    world.wait_phase("Running")
    eventually("the session in Prometheus", lambda: ask(stack, "Sessions by phase", 0, {"phase": "Running"}) == 1)
    before = {moved[:2]: ask(stack, *moved) for moved in MOVED}
    assert before == dict.fromkeys(before, 0)

    world.api.merge(f"/api/v1/nodes/{first}", {"metadata": {"labels": {RULE["key"]: "79"}}})
    recovery = {"id": "a2-b1-e1", "reason": "PodReplaced", "replayedOperations": 4, "lostOperations": 0}
    figures = {"resumedFrom": "m-1:6", "seconds": "1.5", "time": "2026-01-01T00:00:00Z"}
    recovered = [{**recovery, **figures}]
    said = work(0, "0", "0")
    trainer = world.run_pod("tuned-a2-0", second, lastSnapshotTime=stamp(), recoveries=recovered, work=said)
    world.wait_phase("Running")
    replaced = {"session": "tuned", "pod": "tuned-a2-0"}
    eventually("its work in Prometheus", lambda: stack.values("everloop_operations_total", replaced) == [0], 30)
    trainer.report = {**trainer.report, "work": work(5, "4", "1"), "waitingOperations": 3}
    for moved in MOVED:
        eventually(f"{moved} to rise", partial(risen, stack, *moved), 30)
    for panel in PANELS.values():
        for query in panel.queries:
            eventually(f"{query}", lambda: stack.values(expression(query), {}) or panel.title in EMPTY)  # noqa: B023
    # Two, and for a while the two of the pod before.
    eventually("the GPUs", lambda: 1.5 < ask(stack, "GPUs held", 0, {"namespace": world.namespace}) < 4.5, 60)


def asked_of_trainers(told: set[str]) -> dict[str, set[str]]:
    """Of these metrics those that the dashboard or an alert asks for -> the labels by which they are summed up."""
    expressions = [query.expression for panel in PANELS.values() for query in panel.queries]
    asked: dict[str, set[str]] = {}
    for expression in (*expressions, *(alert.expression for alert in ALERTS)):
        labels = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
        for name in told.intersection(re.findall(r"everloop_\w+", expression)):
            asked.setdefault(name, set()).update(labels)
    return asked


@pytest.mark.slow
def test_a_real_trainer_tells_all_that_is_asked_of_trainers(stack: Stack, tmp_path: Path) -> None:
    """Processes of the session pod, read by operator and Prometheus: each metric of the page, with its labels."""
    world, name = stack.world, "real-a1-0"
    tinymodel.write_tiny_model(tmp_path / "model")
    model = {"name": tinymodel.NAME, "source": {"claim": {"claimName": "models", "path": "tiny"}}}
    world.create_session("real", baseModel=model, workers={"resources": {"limits": {"nvidia.com/gpu": 1}}})
    pod = world.bind_pod(name, world.node("real"))
    token = world.token(pod)
    trainer = Pod(tmp_path / "pod", new_address(), tmp_path / "model", uid=pod["metadata"]["uid"], token=token)
    trainer.start()
    try:
        trainer.wait_until("Serving")
        world.pod_runs(name, trainer.ip)
        world.wait_phase("Running", "real")
        wire = Wire(trainer)
        wire.created()
        requests = [wire.forward_backward(1, texts(1, 1, 5)).json(), wire.optim_step(2).json()]
        for request in requests:
            assert wire.retrieve(request["request_id"]).status_code == 200
        wire.client.post("/snapshot", json={"id": "told"})
        wire.client.close()
        told = set(re.findall(r"^\| `(everloop_\w+)` \| namespace, session, pod", PAGE.read_text(), re.MULTILINE))
        asked = asked_of_trainers(told)
        assert asked.keys() >= {"everloop_gpu_useful_seconds_total", "everloop_storage_failing"}
        labels = {"namespace": world.namespace, "session": "real", "pod": name}
        for metric in told:
            eventually(f"{metric} of the trainer", lambda: stack.values(metric, labels), 30)  # noqa: B023
        shown = stack.ask("query", query=f'{{__name__=~"everloop_.*", pod="{name}"}}')["result"]
        for series in shown:
            missing = asked.get(series["metric"]["__name__"], set()) - series["metric"].keys()
            assert not missing, series
        ended = {"kind": "optim_step", "outcome": "succeeded"}
        eventually("its step", lambda: stack.values("everloop_operations_total", {**labels, **ended}) == [1])
        eventually("its use", lambda: stack.values("everloop_gpu_useful_seconds_total", labels)[0] > 0)
    finally:
        trainer.end()


@pytest.mark.slow
def test_alerts_are_loaded_and_ask_for_metrics_that_there_are(stack: Stack) -> None:
    """Prometheus evaluates each without an error; an installation that is well fires none."""
    (group,) = stack.ask("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert.name for alert in ALERTS}
    eventually(
        "evaluation of every alert",
        lambda: all(rule["health"] == "ok" for rule in stack.ask("rules")["groups"][0]["rules"]),
    )
    known = stack.ask("metadata").keys()
    asked = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for alert in ALERTS
        for name in re.findall(r"everloop_\w+", alert.expression)
    }
    assert asked <= known
    firing = [alert["labels"]["alertname"] for alert in stack.ask("alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == []


def test_every_alert_has_its_runbook() -> None:
    """And there is no runbook without its alert."""
    page = PAGE.with_name("runbooks.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [alert.name for alert in ALERTS]
