"""Any client, under any disorder and any faults, against a model that runs one number after another."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from everloop_trainer.session.identifiers import request_id
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.service import SessionService
from everloop_trainer.store import space
from tests.session.calls import NEVER, Calls
from tests.session.fake_engine import FakeEngine
from tests.session.requests import KINDS, Requests
from tests.session.sequential import Sequential
from tests.session.virtual_time import VirtualLoop
from tests.session.world import A, B, C, D, Over, Running, running, states
from tests.store.crash_files import CrashFiles, Died, Disk

EXAMPLES = int(os.environ.get("EVERLOOP_MODEL_EXAMPLES") or 150)
STEPS = 25
MAX_RANK = 64
ENGINE_DEATHS = 2
"""In one example, of engines that die for no operation's sake: three in one operation would make it suspected."""
SIX_MINUTES, STRIDE = 360.0, 20.0
UNAWARE = 1e6
SOON = 0.02

wanted = st.lists(
    st.tuples(st.sampled_from([A, A, B, B, C, D]), st.sampled_from(KINDS), st.integers(0, 11)), min_size=1, max_size=6
)
parts = st.lists(st.sampled_from(["fb", "bad", "bad", "forward"]), min_size=1, max_size=3)
endings = st.sampled_from(["killed", "power", "chaos"])
Work = Callable[[SessionService], Awaitable[object]]


@dataclass
class Incarnation:
    """A running session, and how the client's world sees it end."""

    world: Running
    context: AbstractAsyncContextManager[Running]
    aware: bool
    ending: str = "killed"
    may_end: bool = False

    @property
    def over(self) -> bool:
        return self.world.files.dead or self.world.task.done()


class AnyClient(RuleBasedStateMachine):
    """One client, one disk, and one incarnation after another on it."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)
        self.loop = VirtualLoop(self.chance)
        self.disk, self.calls = Disk(), Calls()
        self.requests = Requests()
        self.attempt, self.engine_dies_in, self.engine_deaths = 0, -1, 0
        self.current: Incarnation | None = None
        self.zombies: list[Incarnation] = []
        self.excused: set[str] = set()
        self.whole = True

    @initialize(luck=st.integers(0, (1 << 32) - 1))
    def begin(self, luck: int) -> None:
        self.chance.seed(luck)

    # what the client does

    @rule(model=st.sampled_from([A, B, C, D]), parts=parts, asks=st.booleans(), dies=st.booleans())
    def train(self, model: str, parts: list[str], asks: bool, dies: bool) -> None:
        """Two steps as loops take them; the second has its parts, perhaps their outcomes, then the optim_step."""
        left_out = [self.sends(operation) for operation in self.left_out()]
        self.do(self.meanwhile(*left_out, *self.new([(model, "optim", 1)], set())))
        self.do(self.meanwhile(*[self.asks(request, 2.0) for request in self.untold()]))
        self.do(self.meanwhile(*self.new([(model, part, 1) for part in parts], set())))
        if asks:
            self.do(self.meanwhile(*[self.asks(request, 2.0) for request in self.untold()]))
        if dies and self.current is not None:
            self.do(self.bury())
        self.do(self.meanwhile(*self.new([(model, "fb", 1)] * (len(parts) % 2) + [(model, "optim", 1)], set())))

    @rule(saver=st.sampled_from([A, B]), loader=st.sampled_from([A, B, C, D]), kind=st.sampled_from(["pin", "save"]))
    def save_and_load(self, saver: str, loader: str, kind: str) -> None:
        self.do(self.meanwhile(*self.new([(saver, kind, 0)], set())))
        self.do(self.meanwhile(*[self.asks(request, 2.0) for request in self.untold()]))
        self.do(self.meanwhile(*self.new([(loader, "load", 0), (loader, "fb", 0), (loader, "optim", 0)], set())))

    @rule(wanted=wanted, skipped=st.one_of(st.just(set()), st.just(set()), st.sets(st.integers(0, 5), max_size=2)))
    def send(self, wanted: list[tuple[str, str, int]], skipped: set[int]) -> None:
        """New numbers, all at once and in any order; some are left out for now."""
        self.do(self.meanwhile(*self.new(wanted, skipped)))

    @rule()
    def send_what_was_left_out(self) -> None:
        self.do(self.meanwhile(*[self.sends(operation) for operation in self.left_out()[:2]]))

    @rule(which=st.integers(0, 1 << 16), other=st.booleans())
    def repeat(self, which: int, other: bool) -> None:
        """A number again; once it was acknowledged, with another content too."""
        if not self.calls.known:
            return
        call = list(self.calls.known.values())[which % len(self.calls.known)]
        changed = other and call.acknowledged != NEVER
        operation = self.requests.another(call.operation) if changed else call.operation
        self.do(self.meanwhile(self.sends(operation)))

    @rule(which=st.integers(0, 1 << 16), timeout=st.sampled_from([0.0, 2.0]))
    def ask(self, which: int, timeout: float) -> None:
        requests = list(self.calls.known)
        if requests:
            self.do(self.meanwhile(self.asks(requests[which % len(requests)], timeout)))

    @rule()
    def ask_for_all(self) -> None:
        self.do(self.meanwhile(*[self.asks(request, 2.0) for request in self.calls.known]))

    @rule()
    def let_six_minutes_pass(self) -> None:
        """Numbers that stay away are given up, and nothing else is."""
        self.do(self.pass_six_minutes())

    @rule()
    def let_five_minutes_pass(self) -> None:
        """Too short a time to give anything up."""
        self.do(self.pass_five_minutes())

    # what happens to the session

    @rule(calls=st.integers(1, 12))
    def engine_dies(self, calls: int) -> None:
        if self.engine_deaths < ENGINE_DEATHS and self.engine_dies_in < 0:
            self.engine_deaths += 1
            self.engine_dies_in = calls

    @rule(effects=st.integers(1, 40), after=st.booleans(), ending=endings)
    def server_dies_at_a_write(self, effects: int, after: bool, ending: str) -> None:
        incarnation = self.do(self.serving())
        files = incarnation.world.files
        files.die_at, files.after, incarnation.ending = files.effects + effects, after, ending
        incarnation.may_end = True

    @rule(ending=endings)
    def server_dies(self, ending: str) -> None:
        if self.current is not None:
            self.current.ending = ending
            self.do(self.bury())

    @rule(wanted=wanted, after=st.floats(0, 0.02))
    def server_dies_meanwhile(self, wanted: list[tuple[str, str, int]], after: float) -> None:
        async def die(_: SessionService) -> None:
            await asyncio.sleep(after)
            if self.current is not None:
                self.current.world.files.kill()

        self.do(self.meanwhile(*self.new(wanted, set()), die))

    @rule()
    def server_is_stopped(self) -> None:
        """An orderly end."""
        if self.current is not None:
            self.current.may_end = True
            self.do(self.current.world.service.drain(10))
            self.do(self.bury())

    @rule(wanted=wanted, after=st.floats(0, 0.02))
    def another_pod_takes_over(self, wanted: list[tuple[str, str, int]], after: float) -> None:
        """While the old one is at work, and lives on."""

        async def take_over(_: SessionService) -> None:
            await asyncio.sleep(after)
            if self.current is not None:
                self.current.may_end = True
                self.zombies.append(self.current)
                self.current = None
            await self.serving()

        self.do(self.meanwhile(*self.new(wanted, set()), take_over))

    @rule(wanted=wanted, which=st.integers(0, 1 << 16))
    def a_zombie_is_asked(self, wanted: list[tuple[str, str, int]], which: int) -> None:
        """It acknowledges nothing, and tells nothing."""
        if not self.zombies or self.current is None:
            return
        service = self.zombies[which % len(self.zombies)].world.service
        known = [*self.calls.known.values()]
        repeats = [self.sends(call.operation) for call in known if call.acknowledged != NEVER]
        asked = [self.asks(call.operation.request_id, SOON) for call in known]
        self.do(self.only_refuses(service, [*self.new(wanted, set()), *repeats, *asked]))

    @rule(number=st.sampled_from([errno.ENOSPC, errno.EROFS]), torn=st.integers(0, 40), wanted=wanted)
    def storage_is_full(self, number: int, torn: int, wanted: list[tuple[str, str, int]]) -> None:
        """For a while, in which nothing new is acknowledged."""
        self.do(self.fill(number, torn, self.new(wanted, set())))

    def teardown(self) -> None:
        try:
            if self.whole:
                self.do(self.finish())
        finally:
            for incarnation in [*self.zombies, *filter(None, [self.current])]:
                self.loop.run_until_complete(incarnation.context.__aexit__(None, None, None))
            self.loop.close()

    # how

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        self.whole = False
        result = self.loop.run_until_complete(work)
        self.whole = True
        return result

    def new(self, wanted: list[tuple[str, str, int]], skipped: set[int]) -> list[Work]:
        """New operations; those that are left out only take their numbers."""
        operations = [self.requests.new(*each) for each in wanted]
        for operation in operations:
            self.calls.skip(operation)
        sent = [operation for index, operation in enumerate(operations) if index not in skipped]
        self.chance.shuffle(sent)
        return [self.sends(operation) for operation in sent]

    def sends(self, operation: Operation) -> Work:
        return lambda service: self.calls.send(service, operation)

    def asks(self, request: str, timeout: float) -> Work:
        return lambda service: self.calls.ask(service, request, timeout)

    def untold(self) -> list[str]:
        return [request for request, call in self.calls.known.items() if call.outcome is None and call.sent != NEVER]

    def left_out(self) -> list[Operation]:
        return [call.operation for call in self.calls.known.values() if call.acknowledged == NEVER]

    async def serving(self, *, replay_budget: float | None = None) -> Incarnation:
        """The incarnation that serves; a new one if there is none."""
        while self.current is None:
            here = replay_budget is None and self.attempt > 0 and not self.zombies and self.chance.random() < 0.3
            self.attempt += not here
            aware = replay_budget is not None or self.chance.random() < 0.7
            context = running(
                self.disk,
                files=CrashFiles(self.disk),
                attempt=self.attempt,
                pod=f"pod-{self.attempt}",
                replay_budget=self.chance.choice([0.0, 1e9]) if replay_budget is None else replay_budget,
                hook=self.reap,
                max_rank=MAX_RANK,
                fence_interval=0.01 if aware else UNAWARE,
                now=lambda: f"{self.chance.randint(1971, 2105)}-01-01T00:00:00Z",
                checkpoint_every=self.chance.choice([0.0, 0.01]),
            )
            self.current = Incarnation(await context.__aenter__(), context, aware)
        return self.current

    def reap(self, engine: FakeEngine, _: str) -> None:
        self.engine_dies_in -= 1
        if self.engine_dies_in == 0:
            engine.die()

    async def meanwhile(self, *works: Work) -> list[object]:
        """All of that at once; the session may end under it, and then its end is seen to."""
        incarnation = await self.serving()
        service = incarnation.world.service
        answers = await asyncio.gather(*(work(service) for work in works), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Over):
                raise answer
        if incarnation is self.current and incarnation.over:
            await self.bury()
        return answers

    async def bury(self) -> None:
        """See to the end of the current incarnation, which must not have ended by itself."""
        incarnation = self.current
        assert incarnation is not None
        task, files, self.current = incarnation.world.task, incarnation.world.files, None
        self.zombies.append(incarnation)  # until it is gone
        if task.done() and not task.cancelled():
            failure = task.exception()
            assert incarnation.may_end or files.dead, f"ended by itself: {failure!r}"
            assert failure is None or isinstance(failure, (*Over, Died)), f"a defect: {failure!r}"
        await incarnation.context.__aexit__(None, None, None)
        self.zombies.remove(incarnation)
        if incarnation.ending != "killed":
            self.disk.lose_power(self.chance if incarnation.ending == "chaos" else None)

    async def only_refuses(self, service: SessionService, works: list[Work]) -> None:
        for answer in await asyncio.gather(*(work(service) for work in works), return_exceptions=True):
            assert isinstance(answer, (Pending, *Over)), answer

    async def fill(self, number: int, torn: int, works: list[Work]) -> None:
        incarnation = await self.serving()
        files, service = incarnation.world.files, incarnation.world.service
        incarnation.may_end, files.refuse, files.torn = True, number, torn
        held = [asyncio.ensure_future(work(service)) for work in works]
        answered, _ = await asyncio.wait(held, timeout=0.1)
        assert incarnation.over or not answered, "acknowledged on full storage"
        files.refuse = None
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(answer, Over) for answer in answers), answers
        await self.bury()

    def first_missing(self) -> list[str]:
        """Of each model the first number that was not acknowledged, if a later one was."""
        found = []
        for stream in (A, B, C, D):
            numbers = {c.operation.seq: c for c in self.calls.known.values() if c.operation.stream == stream}
            acknowledged = [seq for seq, call in numbers.items() if call.acknowledged != NEVER]
            missing = [seq for seq, call in numbers.items() if call.acknowledged == NEVER and call.outcome is None]
            if missing and min(missing) < max(acknowledged, default=0):
                found.append(request_id(stream, min(missing)))
        return found

    async def pass_six_minutes(self) -> None:
        incarnation = await self.serving()
        missing, world = self.first_missing(), incarnation.world
        if not missing or not incarnation.aware:
            return
        self.excused |= {call.operation.request_id for call in self.calls.known.values() if call.acknowledged == NEVER}
        try:
            for request in filter(self.calls.known.__contains__, map(before, missing)):
                await self.calls.ask(world.service, request, 60.0)  # its turn comes after that
            for _ in range(int(SIX_MINUTES / STRIDE) + 3):
                await self.calls.ask(world.service, missing[0], 0)
                world.clock.now += STRIDE
                await asyncio.sleep(SOON)
            for request in missing:
                outcome = await self.calls.ask(world.service, request, 5.0)
                assert isinstance(outcome, Succeeded | Failed), f"{request} is awaited for ever: {outcome}"
        except Over:
            pass
        if incarnation.over:
            await self.bury()

    async def pass_five_minutes(self) -> None:
        if self.current is not None:
            await self.bury()  # the next one's clock begins anew, and ends with it
        incarnation = await self.serving()
        incarnation.may_end = True
        missing = self.first_missing()
        for _ in range(int(SIX_MINUTES / STRIDE) - 3):
            incarnation.world.clock.now += STRIDE
            for request in missing[:1]:
                await self.calls.ask(incarnation.world.service, request, 0)
            await asyncio.sleep(SOON)
        await self.bury()

    async def finish(self) -> None:
        """Everything is sent and told in the end; a restart later it is all as it was."""
        for replay_budget in (0.0, 1e9):
            if self.current is not None:
                self.current.may_end, self.current.ending = True, "killed"
                await self.bury()
            world = (await self.serving(replay_budget=replay_budget)).world
            left = self.left_out()
            self.chance.shuffle(left)
            await asyncio.gather(*(self.calls.send(world.service, operation) for operation in left))
            for request in self.calls.known:
                outcome = await self.calls.ask(world.service, request, 60.0)
                assert isinstance(outcome, Succeeded | Failed), f"{request}: {outcome}"
            await world.settled()
            self.compare(world)

    def compare(self, world: Running) -> None:
        model = Sequential(self.calls.known, MAX_RANK)
        for request, expected in model.expected.items():
            call = self.calls.known[request]
            told = call.outcome.category if isinstance(call.outcome, Failed) else call.outcome
            assert told == expected, f"{request}: {call.outcome}, expected {expected}"
            assert not call.given_up or request in self.excused, f"{request} was given up too early"
        assert states(world.engine) == {name: each.adapter.dump() for name, each in model.models.items()}
        status = world.service.status()
        assert status.replay_mismatches == 0
        assert all(recovery.lost_operations == 0 for recovery in status.recoveries)


def before(request: str) -> str:
    stream, _, seq = request.rpartition(":")
    return f"{stream}:{int(seq) - 1}"


def test_any_client_under_any_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each outcome, and each adapter at the end, is the sequential model's; each outcome is told once and for all."""
    monkeypatch.setattr(space, "RESERVE", 1024)  # the disk is in memory
    run_state_machine_as_test(
        seeded(seed)(AnyClient),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
