"""Each single call of the operator is spoiled in each way, and in the end everything is as it should be."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.operator.faults.conftest import Restarted
from tests.operator.faults.journeys import PATIENCE_SECONDS, QUIET_SECONDS, EndingJourney, JobJourney, Journey
from tests.operator.faults.proxy import STALLS, Call, Fault, Proxy
from tests.operator.world import Api, World, eventually

pytestmark = pytest.mark.slow

JOURNEYS: tuple[type[Journey], ...] = (Journey, EndingJourney, JobJourney)
WHOLE = "EVERLOOP_TEST_WHOLE" in os.environ
SAMPLE, SAMPLED_KILLS = 6, 1
AT_A_TIME = 6
"""Fewer than the operator's passes and connections: a call that stalls holds one of each."""
UNBROKEN, ATTEMPTS = 2, 4
WINDOWS = 5
"""Of quiet time, in one of which nothing is written: an operator that has just begun looks at everything once."""
NOT_MET, UNMET_OF = "was not met", 20
"""Some calls are only made where something takes its time; one in so many may never come."""
EVERY = 20
"""So often a long run says how far it is."""

_numbers = itertools.count(1)


class Broken(NamedTuple):
    """One experiment."""

    journey: type[Journey]
    call: Call
    fault: Fault

    def __str__(self) -> str:
        return f"{self.journey.__name__}: {self.call}: {self.fault}"


class Unbroken(NamedTuple):
    """What the operator asks for when nothing goes wrong."""

    calls: list[Call]
    writes: int


@contextmanager
def journey(kind: type[Journey], api: Api) -> Iterator[Journey]:
    number = next(_numbers)
    world = World(api, f"faults-{number}", 100 + number % 150)
    try:
        yield kind(world)
    finally:
        world.close()


def unbroken(kind: type[Journey], api: Api, proxy: Proxy) -> Unbroken:
    with journey(kind, api) as travelled:
        travelled.run()
        namespace = travelled.world.namespace
        calls, written = list(proxy.calls[namespace]), proxy.writes(namespace)
        travelled.judge(written, len(written))
        return Unbroken(calls, len(written))


@pytest.fixture(scope="module")
def baseline(api: Api, proxy: Proxy, restarted: Restarted) -> dict[type[Journey], Unbroken]:
    """The calls that every unbroken run makes, and how many writes are among them at most."""
    with ThreadPoolExecutor(UNBROKEN * len(JOURNEYS)) as pool:
        runs = {kind: [pool.submit(unbroken, kind, api, proxy) for _ in range(UNBROKEN)] for kind in JOURNEYS}
        found = {kind: [run.result() for run in several] for kind, several in runs.items()}
    return {
        kind: Unbroken(
            sorted(set.intersection(*(set(run.calls) for run in several))), max(run.writes for run in several)
        )
        for kind, several in found.items()
    }


def broken(experiment: Broken, api: Api, proxy: Proxy, writes: int) -> str:
    """What is wrong afterwards; "" for nothing."""
    for _ in range(ATTEMPTS):
        wrong, met = attempt(experiment, api, proxy, writes)
        if met or wrong:
            return wrong
    return f"{experiment}: {NOT_MET}"


def attempt(experiment: Broken, api: Api, proxy: Proxy, writes: int) -> tuple[str, bool]:
    """What is wrong afterwards, and whether the call was made."""
    with journey(experiment.journey, api) as travelled:
        namespace = travelled.world.namespace
        proxy.spoil(namespace, experiment.call, experiment.fault)
        try:
            travelled.run()
            travelled.judge(proxy.writes(namespace), writes)
        except AssertionError as error:
            return f"{experiment}: {error}", namespace in proxy.hit
        after = proxy.calls[namespace]
        for _ in range(WINDOWS):
            before = len(after)
            time.sleep(QUIET_SECONDS)
            if not any(call.writes for call in after[before:]):
                break
        else:
            wrong = f"it goes on writing: {[str(call) for call in after[before:]]}"
            return f"{experiment}: {wrong}", namespace in proxy.hit
        return "", namespace in proxy.hit


def told(wrong: Iterable[str], of: int) -> list[str]:
    """What was wrong; says meanwhile how far it is."""
    start, found = time.monotonic(), []
    for number, text in enumerate(wrong, 1):
        if text:
            found.append(text)
            print(text, flush=True)
        if number % EVERY == 0:
            elapsed = time.monotonic() - start
            left = elapsed / number * (of - number) / 60
            print(f"{elapsed:7.1f} s  {number}/{of} experiments   about {left:.0f} min left", flush=True)
    return found


def test_any_call_may_fail_in_any_way(
    api: Api, proxy: Proxy, restarted: Restarted, baseline: dict[type[Journey], Unbroken], seed: int
) -> None:
    """Right final state, no child twice, few writes more, and silence after that; the operator never ends.

    Of all statuses that it has written meanwhile, the API server has pruned nothing.
    """
    faults = [fault for fault in Fault if fault != Fault.KILL_AFTER and (WHOLE or fault not in STALLS)]
    every = [Broken(kind, call, fault) for kind, run in baseline.items() for call in run.calls for fault in faults]
    random.Random(seed).shuffle(every)
    chosen = every if WHOLE else every[:SAMPLE]
    print(f"{len(chosen)} of {len(every)} experiments")
    starts = restarted.starts
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ended = pool.map(lambda item: broken(item, api, proxy, baseline[item.journey].writes), chosen)
        said = told(ended, len(chosen))
    assert [text for text in said if not text.endswith(NOT_MET)] == []
    assert len(said) <= max(1, len(chosen) // UNMET_OF), said
    assert restarted.starts == starts, restarted.log.read_text()[-3000:]
    assert '"defect"' not in restarted.log.read_text()
    assert proxy.altered == []


def test_the_operator_may_be_killed_after_any_write(
    api: Api, proxy: Proxy, restarted: Restarted, baseline: dict[type[Journey], Unbroken], seed: int
) -> None:
    """What it has done already is recognised by the process that takes its place."""
    every = [
        Broken(kind, call, Fault.KILL_AFTER) for kind, run in baseline.items() for call in run.calls if call.writes
    ]
    random.Random(seed).shuffle(every)
    chosen = every if WHOLE else every[:SAMPLED_KILLS]
    starts = restarted.starts
    ended = (broken(experiment, api, proxy, baseline[experiment.journey].writes) for experiment in chosen)
    assert told(ended, len(chosen)) == []
    assert restarted.starts == starts + len(chosen)


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.KILL_AFTER])
def test_edits_while_a_pod_is_made_are_carried_out(api: Api, proxy: Proxy, restarted: Restarted, fault: Fault) -> None:
    """The last of two counts, and is said to be seen; also if the operator is killed in between."""
    with journey(Journey, api) as travelled:
        world = travelled.world
        proxy.spoil(world.namespace, Call("PATCH", "/api/v1/pods/tuned-a1-0", 0), fault)
        world.claims()
        world.create_session(image="v:1")
        eventually("the pod is being made", lambda: world.namespace in proxy.hit, PATIENCE_SECONDS)
        path = f"{world.sessions_path}/tuned"
        generations = [world.api.merge(path, {"spec": {"image": image}}) for image in ("v:2", "v:3")]
        generation = generations[-1]["metadata"]["generation"]

        def current() -> bool:
            pods = [pod for pod in world.pods() if "deletionTimestamp" not in pod["metadata"]]
            images = [pod["spec"]["containers"][0]["image"] for pod in pods]
            return images == ["v:3"] and world.status().get("observedGeneration") == generation

        eventually("the last edit", current, PATIENCE_SECONDS)


def test_what_an_expired_watch_has_missed_is_made_up_for(api: Api, proxy: Proxy, restarted: Restarted) -> None:
    """Its successor shows what happens after it; what happened before is read from lists, and not minutes later."""
    with journey(Journey, api) as travelled:
        world = travelled.world
        world.claims()
        world.create_session()
        world.wait_pod("tuned-a1-0")
        eventually("the attempt in the status", lambda: world.status().get("attempt") == 1, PATIENCE_SECONDS)
        proxy.deafen()
        world.remove_pod("tuned-a1-0")
        proxy.expire()
        eventually("another pod", lambda: world.pod("tuned-a2-0"), PATIENCE_SECONDS)
