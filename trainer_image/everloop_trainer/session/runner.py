"""Driving the engine: get one, bring the models back, run operations; and again when it is lost.

Operations of models run one at a time. Samples change nothing, so many are in the engine at once, beside those.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from everloop_trainer.session.autosaving import Autosaving
from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.execution import Execution
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import OptimStep, Sample, asked_kind
from everloop_trainer.session.poison import Verdict
from everloop_trainer.session.ports import Engine, EngineSource
from everloop_trainer.session.records import Result, Try
from everloop_trainer.session.recovery import changes_state, usable
from everloop_trainer.session.restoring import Restored, Restoring
from everloop_trainer.session.snapshotting import Snapshotting
from everloop_trainer.session.status import Reason, Recovery, State
from everloop_trainer.session.streams import Entry, Stream
from everloop_trainer.session.turns import Turns

FIRST_DELAY = 0.02
LONGEST_DELAY = 1.0
LOST = (ConnectionError, EOFError)
MOST_SAMPLES = 64
"""Requests that are in the engine at once; the others wait here, where another engine finds them.

A key that has none in it does not wait for those of others: its first goes in beyond these, up to twice as many.
"""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What was last asked for from outside."""

    name: str = ""
    waiting: bool = False
    """Whether no step boundary has been reached since."""


class Runner:
    """Runs accepted operations in turn: round robin over keys and over the streams of each, in order within a model.

    `running` is the operation that was begun at `started`, `sampling` the samples beside it by request id, each with
    when it was begun; `worked` is when the last operation ended. All times are monotonic.

    Args:
        context: shared with the service.
        source: where engines come from.
        finished: called with each operation whose result is durable, and the bytes of that.
    """

    def __init__(self, context: Context, source: EngineSource, finished: Callable[[Entry, int], None]) -> None:
        self._context = context
        self._source = source
        self._finished = finished
        self._execution = Execution(context)
        self._restoring = Restoring(context)
        self.snapshots = Snapshotting(context)
        self._autosaving = Autosaving(context)
        self._turns = Turns(context.keys.of)
        self._due: dict[str, float] = {}
        """By model: since when its next operation could have run."""
        self._begun: Entry | None = None
        """The operation of a model that was begun last."""
        self._recovering = bool(context.history.streams)
        self._since = context.config.monotonic()
        self._generation = 0
        self._wake = asyncio.Event()
        self._draining = False
        self._spared: dict[str, int] = {}
        """By model: up to which operation no replay has to run alone any more."""
        self._served = False
        self._request = SnapshotRequest()
        self.engine: Engine | None = None
        self.running: Entry | None = None
        self.sampling: dict[str, float] = {}
        self._in_engine: Counter[str] = Counter()
        """Samples in the engine by key."""
        self._samples: dict[asyncio.Task[None], str] = {}
        self._ending: set[str] = set()
        """Operations whose result is on its way to the disk: each has one, whoever else would end it."""
        self._cancelling: dict[str, asyncio.Task[None]] = {}
        self.started = self.worked = self._counted = self._since
        self.recoveries: list[Recovery] = []

    @property
    def generation(self) -> int:
        """How many engines this incarnation has had."""
        return self._generation

    @property
    def state(self) -> State:
        """See SessionStatus."""
        if self.engine is not None:
            return "Serving"
        return "Recovering" if self._recovering or self._generation else "Starting"

    def offer(self, stream: str) -> None:
        """A stream has an operation that may run."""
        self._turns.offer(stream)
        self._note_due(stream)
        self._wake.set()

    def regroup(self) -> None:
        """It was heard whose a stream is."""
        self._turns.regroup()

    def request_snapshots(self, name: str) -> None:
        """Snapshot every model at the next step boundary; a request of the same name is made once."""
        if name != self._request.name:
            self._request = SnapshotRequest(name, waiting=True)
            self._wake.set()

    @property
    def requested(self) -> tuple[str, int] | None:
        """Name of the latest request for snapshots, and how many models it still waits for; None if there was none."""
        if not self._request.name:
            return None
        waiting = len(self._context.history.models) if self._request.waiting else self.snapshots.under_way
        return self._request.name, waiting

    def drain(self) -> None:
        """Start nothing new: finish the running operation, snapshot every model, and end `run`."""
        self._draining = True
        self._wake.set()

    async def cancel(self, entry: Entry) -> None:
        """End a sample that has not ended as failed, and take it out of the engine; ends once that is durable.

        Raises Fenced or StorageFailed.
        """
        ending = self._cancelling.get(entry.request_id)
        if ending is None:
            if not self._may_end(entry):
                return
            self._ending.add(entry.request_id)
            # Whoever asked for it may go away meanwhile, but what is being written must take effect.
            ending = asyncio.create_task(self._cancel(entry), name=f"cancel {entry.request_id}")
            self._cancelling[entry.request_id] = ending
            ending.add_done_callback(lambda _: self._cancelling.pop(entry.request_id))
        await asyncio.shield(ending)

    async def _cancel(self, entry: Entry) -> None:
        for task, request in self._samples.items():
            if request == entry.request_id:
                task.cancel()
        await self._end(entry, *self._execution.cancel(entry))
        self._context.work.end(asked_kind(entry.args), ok=False, seconds=0.0)

    def _may_end(self, entry: Entry) -> bool:
        return entry.ended is None and entry.request_id not in self._ending

    async def run(self) -> None:
        """Run until drained. Raises Fenced or StorageFailed."""
        while (engine := await self._connect()) is not None:
            try:
                if await self._run_suspect(engine):
                    continue
                await self._recover(engine)
                self.engine, self._served = engine, True
                await self._serve(engine)
                if not self._draining:
                    continue
                await self.snapshots.take_all(engine, self._generation)
                return
            except LOST as error:
                self._lost(engine, error)
            finally:
                self.engine = None
                await engine.close()

    async def _run_suspect(self, engine: Engine) -> bool:
        """Run the first operation that has to run alone, if there is one: the engine is used up by that.

        What it changed is snapshotted at once, so that no other engine has to run it again beside other models.
        """
        await self._give_up_condemned()
        entry = self._first("suspected")
        model = await self._unspared() if entry is None else self._context.history.models.get(entry.stream)
        if entry is None and model is None:
            return False
        what = entry.request_id if entry is not None else "replay"
        log.warning("running alone what engines died in", operation=what, pid=engine.pid)
        self._recovering = True
        if model is not None and await self._restoring.restore(engine, model) is None:
            self._spare(model)
            return True
        if entry is not None:
            await self._run_one(engine, entry)
        if model is not None and (entry is None or changes_state(entry)):
            await self.snapshots.take(engine, self._generation, model.info.model_id)
            self._spare(model)  # also if the storage took no snapshot: once is enough
        return True

    async def _unspared(self) -> Model | None:
        """A model whose replay would hold an operation that passed alone: its server died before the snapshot."""
        for name, model in self._context.history.models.items():
            entries = self._context.history.streams[name].entries.values()
            alone = max(
                (entry.seq for entry in entries if entry.tries.passed_alone and changes_state(entry)), default=0
            )
            if alone <= self._spared.get(name, 0):
                continue
            stored = usable(self._context.history.streams[name], await self._context.states.snapshots(name))
            if all(snapshot.seq < alone for snapshot in stored):
                return model
            self._spared[name] = alone
        return None

    def _spare(self, model: Model) -> None:
        self._spared[model.info.model_id] = self._context.history.streams[model.info.model_id].done - 1

    async def _give_up_condemned(self) -> None:
        while (entry := self._first("condemned")) is not None:
            log.error("operation given up: no engine survives it", operation=entry.request_id)
            await self._end(entry, *self._execution.give_up(entry))

    def _first(self, verdict: Verdict) -> Entry | None:
        """The first operation of that verdict among those that may run now."""
        for name, stream in self._context.history.streams.items():
            if name in self._context.broken:
                continue
            for entry in stream.runnable():
                if self._may_end(entry) and self._verdict(entry) == verdict:
                    return entry
        return None

    def _verdict(self, entry: Entry) -> Verdict:
        return entry.tries.verdict(self._context.config.incarnation.number)

    def _lost(self, engine: Engine, error: BaseException) -> None:
        during = self.running.request_id if self.running is not None else None
        log.warning("engine lost", pid=engine.pid, generation=self._generation, during=during, error=str(error))
        if self.engine is not None:  # losing another one while recovering does not start the clock anew
            self._since = self._context.config.monotonic()
        self._recovering = True
        self.running = self._begun = None

    async def _connect(self) -> Engine | None:
        """The next engine, or None once drained."""
        delay = FIRST_DELAY
        said = ""
        while not self._draining:
            try:
                engine = await self._source.connect()
            except (OSError, EOFError) as error:
                reason = str(error)
                if reason != said:  # once for each reason, or a session would wait without a word
                    log.warning("no engine yet", error=reason)
                    said = reason
                await self._pause(delay)
                delay = min(2 * delay, LONGEST_DELAY)
                continue
            self._generation += 1
            log.info("engine connected", pid=engine.pid, generation=self._generation)
            return engine
        return None

    async def _pause(self, seconds: float) -> None:
        """Wait, but not once drained: operations that arrive meanwhile need no haste."""
        try:
            async with asyncio.timeout(seconds):
                while not self._draining:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _recover(self, engine: Engine) -> None:
        """Bring every model back, and report it if there was something to recover."""
        restored = []
        for name in self._context.broken.keys() - self._context.history.models.keys():
            del self._context.broken[name]  # there is nothing to restore: what was damaged is read again
        for model in list(self._context.history.models.values()):
            done = await self._restoring.restore(engine, model)
            if done is not None:
                restored.append(done)
                self.snapshots.restored(done.model_id, done.seconds)
        if self._recovering:
            self._report(restored)
        self._recovering = False
        for name, stream in self._context.history.streams.items():
            if stream.pending:
                self.offer(name)

    def _report(self, restored: list[Restored]) -> None:
        config = self._context.config
        incarnation, previous = config.incarnation, config.previous
        reason: Reason = "EngineLost"
        if previous is not None and not self._served:
            reason = "ServerRestarted" if previous.pod_uid == incarnation.pod_uid else "PodReplaced"
        recovery = Recovery(
            id=f"a{incarnation.attempt}-b{incarnation.boot}-e{self._generation}",
            reason=reason,
            resumed_from=",".join(f"{storage_id(model.model_id)}:{model.resumed_from}" for model in restored),
            replayed_operations=sum(model.replayed for model in restored),
            lost_operations=self._lost_operations(),
            seconds=config.monotonic() - self._since,
            time=config.now(),
        )
        self.recoveries.append(recovery)
        log.info(
            "recovered",
            id=recovery.id,
            reason=reason,
            resumed_from=recovery.resumed_from,
            replayed=recovery.replayed_operations,
            lost=recovery.lost_operations,
            seconds=round(recovery.seconds, 3),
        )

    def _lost_operations(self) -> int:
        """Accepted operations that have no result and cannot be run: those of streams that stopped."""
        return sum(len(self._context.history.streams[stream].pending) for stream in self._context.broken)

    async def _serve(self, engine: Engine) -> None:
        """Run operations until drained, or until one must run alone. Raises ConnectionError, EOFError: engine lost."""
        lost = asyncio.create_task(engine.wait_lost(), name="engine lost")
        lost.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._draining:
                self._wake.clear()
                if lost.done():
                    raise ConnectionError("the engine closed its connection")
                self._look_after_samples()
                if self._request.waiting:
                    request = self._request
                    await self.snapshots.begin_all(engine, self._generation)
                    if self._request is request:
                        self._request = replace(request, waiting=False)
                entry = self._next()
                if entry is None:
                    await self._wake.wait()
                elif self._verdict(entry) != "innocent":
                    break
                elif isinstance(entry.args, Sample):
                    self._begin_sample(engine, entry)
                else:
                    await self._run_one(engine, entry)
            # What is in the engine now has its result before the engine is let go: else it would seem to die in it.
            while self._samples:
                await asyncio.wait(self._samples, return_when=asyncio.FIRST_COMPLETED)
                self._look_after_samples()
        except LOST:
            # Each ends by itself, with the loss or with a result that is being written and must not come twice.
            await asyncio.gather(*self._samples, return_exceptions=True)
            raise
        finally:
            lost.cancel()
            for sample in self._samples:
                sample.cancel()
            await asyncio.wait({lost, *self._samples})
            self._samples.clear()

    def _begin_sample(self, engine: Engine, entry: Entry) -> None:
        key = self._context.keys.of(entry.stream)
        self.sampling[entry.request_id] = self._context.config.monotonic()
        self._in_engine[key] += 1
        sample = asyncio.create_task(self._run_sample(engine, entry, key), name=entry.request_id)
        self._samples[sample] = entry.request_id
        sample.add_done_callback(lambda _: self._wake.set())

    async def _run_sample(self, engine: Engine, entry: Entry, key: str) -> None:
        try:
            await self._run_one(engine, entry)
        finally:
            del self.sampling[entry.request_id]
            self._in_engine[key] -= 1

    def _look_after_samples(self) -> None:
        """Raise what a sample's task raised: the engine is lost, or this incarnation is over."""
        for sample in [each for each in self._samples if each.done()]:
            del self._samples[sample]
            if not sample.cancelled():
                sample.result()

    def _next(self) -> Entry | None:
        """The operation whose turn it is."""
        streams, broken = self._context.history.streams, self._context.broken
        return self._turns.take(
            lambda name: self._ready(streams[name]), lambda name: not streams[name].pending or name in broken
        )

    def _ready(self, stream: Stream) -> Entry | None:
        """The next operation of a stream that does not run yet, or None if none may."""
        if stream.ordered:
            return stream.ready()
        if not _has_place(len(self.sampling), self._in_engine[self._context.keys.of(stream.name)]):
            return None
        waiting = (entry for entry in stream.pending.values() if entry.request_id not in self.sampling)
        return next((entry for entry in waiting if entry.durable and self._may_end(entry)), None)

    async def _run_one(self, engine: Engine, entry: Entry) -> None:
        """Run an operation and make its result durable before anything else happens.

        A snapshot may follow only then: one that holds an operation without a result would make it count twice.
        An operation that cannot be read back stops its stream; no engine has tried it then, so none can be said to
        have died in it.
        """
        context = self._context
        try:
            request = await self._execution.request(entry)
        except JournalDamaged as damage:
            context.stop(entry.stream, str(damage))
            return
        begun = self._begin(entry)
        tried = Try(entry.stream, entry.seq, engine.pid)
        position, noted = context.journal.note(tried)
        await asyncio.shield(noted)
        context.history.apply(tried, position)
        noting = context.config.monotonic() - begun
        if entry.request_id not in self.sampling:
            self.running, self.started = entry, context.config.monotonic()
        result, body, seconds = await self._execution.run(engine, self._generation, entry, request)
        if not self._may_end(entry):  # cancelled, while it ran alone
            self.running = None
            return
        now = context.config.monotonic()
        useful, self._counted = min(seconds, now - self._counted), now  # what ran beside it counts once
        await self._end(entry, result, body)
        context.work.end(asked_kind(entry.args), ok=result.ok, seconds=useful)
        if not isinstance(entry.args, Sample):
            context.work.spend("journal", noting + context.config.monotonic() - now)
            self._note_due(entry.stream)
        if changes_state(entry):
            self.snapshots.worked(entry.stream, seconds)
        if isinstance(entry.args, OptimStep) and entry.stream in context.history.models:
            await self.snapshots.take_if_due(engine, self._generation, entry.stream)
            await self._autosaving.take_if_due(engine, self._generation, entry.stream)

    def _note_due(self, stream: str) -> None:
        """From now on its next operation waits for the engine, if there is one whose turn it is."""
        known = self._context.history.streams[stream]
        if known.ordered and known.ready() not in (None, self._begun):
            self._due.setdefault(stream, self._context.config.monotonic())

    def _begin(self, entry: Entry) -> float:
        """The time now, until when an operation of a model has waited."""
        now = self._context.config.monotonic()
        if not isinstance(entry.args, Sample):
            self._begun = entry
            self._context.work.spend("wait", now - self._due.pop(entry.stream, now))
        return now

    async def _end(self, entry: Entry, result: Result, body: bytes) -> None:
        self._ending.add(entry.request_id)
        position, durable = self._context.journal.append(result, body)
        await asyncio.shield(durable)
        self._context.history.apply(result, position)
        self._ending.discard(entry.request_id)
        self.worked = self._context.config.monotonic()
        if self.running is entry:
            self.running = None
        self._finished(entry, len(body))


def _has_place(sampling: int, of_key: int) -> bool:
    """Whether one more sample of a key goes into an engine that has so many, and so many of this key."""
    return sampling < (MOST_SAMPLES if of_key else 2 * MOST_SAMPLES)
