"""The session as the server sees it: accept operations, wait for outcomes, tell the state, drive the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from everloop_trainer.session import reporting
from everloop_trainer.session.base import Base, given_up, restore
from everloop_trainer.session.clients import ClientSession, client_sessions
from everloop_trainer.session.compacting import Compacting, Compactor
from everloop_trainer.session.completions import BLOCK, Completion, Completions
from everloop_trainer.session.context import Context, SessionConfig
from everloop_trainer.session.copying import Copying
from everloop_trainer.session.errors import Fenced, JournalDamaged, Replaced, StorageFailed
from everloop_trainer.session.gaps import MINUTES, Gaps, explanation
from everloop_trainer.session.history import Checkpoint, History, Kept, ModelInfo, SamplerInfo
from everloop_trainer.session.identifiers import is_model, is_sampler, request_id, split_request_id
from everloop_trainer.session.keeping import Keeping
from everloop_trainer.session.operations import WEIGHTS_OF_SAMPLER, CreateModel, LoadWeights, Operation, Refused, Sample
from everloop_trainer.session.outcomes import Failed, Outcome, Pending, Succeeded, Unknown
from everloop_trainer.session.ports import Copies, EngineSource, Journal, Position, States
from everloop_trainer.session.records import Accept, Deliver, Lost, Record, Restored, Result, is_readable
from everloop_trainer.session.rollback import RolledBack
from everloop_trainer.session.runner import Runner
from everloop_trainer.session.status import AutomaticCheckpoints, SessionStatus
from everloop_trainer.session.streams import Ended, Entry
from everloop_trainer.session.underway import Underway

__all__ = ["ModelInfo", "Run", "SamplerInfo", "SessionConfig", "SessionService"]
MOST_READ = 8
"""Results that are read from the journal at a time: they are in memory from then until their clients have them."""
DELIVERY_SECONDS = 2.0
"""How long the journal may take over a failure's delivery before the client is asked to come again."""
UNREADABLE = "body: text that is not Unicode, or values that nest too deeply, cannot be stored"
FORGOTTEN = (
    "request_id: this operation has ended and its result was fetched more than 24 hours ago; results are not kept for "
    "longer, and it will not run again"
)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """A model as a listing shows it, with its named checkpoints, newest first; `last_request` is RFC 3339."""

    info: ModelInfo
    last_request: str
    broken: bool
    checkpoints: tuple[Checkpoint, ...]


class SessionService:
    """See the module. Whatever may be awaited raises Fenced or StorageFailed once this incarnation has ended.

    Must be made inside a running event loop.

    Args:
        config: who we are and what we may do.
        journal: open, its `open` record written.
        states: stored model states.
        source: where engines come from.
        base: what the history begins with, if it was compacted.
        history: the records behind that, in order.
        compactor: what shortens the journal.
        copies: what copies stored states elsewhere, if anything does.
        restored: models of a storage that was lost; those that the history has not are journaled.

    Raises:
        JournalDamaged: the records contradict each other.
    """

    def __init__(
        self,
        config: SessionConfig,
        journal: Journal,
        states: States,
        source: EngineSource,
        base: Base | None,
        history: Iterable[tuple[Position, Record]],
        compactor: Compactor,
        copies: Copies | None = None,
        restored: Iterable[RolledBack] = (),
    ) -> None:
        facts = History() if base is None else restore(base)
        for position, record in history:
            try:
                facts.apply(record, position)
            except ValueError as error:
                where = f"journal {position.incarnation} at offset {position.offset}"
                raise JournalDamaged(f"{where}: {error}") from error
        for model in restored:
            if model.model_id not in facts.streams:
                log.warning("model rolled back: its storage was lost", model=model.model_id, number=model.number)
                facts.apply(Restored(model), journal.append(Restored(model))[0])
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = Context(config, facts, journal, states, ended, Underway(config.monotonic))
        self._runner = Runner(self._context, source, self._finished)
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._delivering: dict[str, asyncio.Future[None]] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._sampled: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._reading = asyncio.Semaphore(MOST_READ)
        self._completions = Completions(config.incarnation.number)
        self._compacting = Compacting(self._context, compactor, lambda: self._runner.engine is not None)
        self._keeping = Keeping(self._context)
        self._copies = copies
        self._copying = None if copies is None else Copying(self._context, copies, self._runner.snapshots.newest)
        self._copy_until: float | None = None
        self._gaps = Gaps()
        self._heard = config.monotonic()
        self._main: asyncio.Task[None] | None = None
        log.info("history read", streams=len(facts.streams), models=len(facts.models), unfinished=facts.unfinished())

    def hear(self, stream: str, key: str) -> None:
        """A call about a stream came with this key: keys take turns, and what is computed is counted by them."""
        if (is_model(stream) or is_sampler(stream)) and self._context.keys.hear(stream, key):
            self._runner.regroup()

    async def accept(self, operation: Operation) -> None:
        """Accept an operation; ends once it is durable and the fence was read after that.

        A repeat is recognised by stream and number alone: it waits until the first is durable, and its content is
        not looked at.

        Raises:
            ValueError: the operation is too large to be journaled.
        """
        self._heard = self._context.config.monotonic()
        request = operation.request_id
        if self._context.history.find(request) is None:
            self._append(operation)
        accepting = self._accepting.get(request)
        if accepting is not None:
            await asyncio.shield(accepting)
        else:
            await self._context.journal.check_fence()

    def _append(self, operation: Operation) -> None:
        context = self._context
        args = self._resolve(operation).args
        closed = context.history.closed(operation.stream)
        if closed is not None:
            args = Refused(args.operation if isinstance(args, Refused) else args.KIND, closed)
        record = Accept(operation.stream, operation.seq, args, context.config.now())
        if not is_readable(record):
            kind = record.args.operation if isinstance(record.args, Refused) else record.args.KIND
            record = replace(record, args=Refused(kind, UNREADABLE))
        position, durable = context.journal.append(record, operation.body)
        context.history.apply(record, position, durable=False)
        self._await_durable(operation.request_id, durable)

    def _await_durable(self, request: str, durable: asyncio.Future[None]) -> None:
        self._accepting[request] = durable
        durable.add_done_callback(lambda future: self._accepted(request, future))

    def _accepted(self, request: str, durable: asyncio.Future[None]) -> None:
        if durable.cancelled() or durable.exception() is not None:
            return  # the failed future stays, so that no repeat is taken for accepted
        del self._accepting[request]
        entry = self._context.history.entry(request)
        assert entry is not None, "it was taken in when it was appended"
        entry.durable = True
        self._runner.offer(entry.stream)

    def _resolve(self, operation: Operation) -> Operation:
        """Settle at acceptance what a replay must find settled: seeds, and which file is sampled from or loaded."""
        args = operation.args
        if isinstance(args, LoadWeights):
            checkpoint = self._context.history.checkpoints.get(args.path)
            if checkpoint is None or checkpoint.model_id == operation.stream:
                return operation
            return replace(operation, args=replace(args, source=checkpoint.frozen))
        if not isinstance(args, CreateModel | Sample):
            return operation
        if args.seed is None:
            args = replace(args, seed=self._context.config.draw_seed())
        if isinstance(args, Sample) and args.weights is not None:
            args = replace(args, weights=self._frozen(operation.stream, args.weights))
        return replace(operation, args=args)

    def _frozen(self, sampler: str, weights: str) -> str:
        """The `frozen:` name of weights, or the name as it came: then the sample ends as a user error."""
        history = self._context.history
        if weights == WEIGHTS_OF_SAMPLER:
            return history.weights_of_sampler(sampler) or weights
        checkpoint = history.checkpoints.get(weights)
        return weights if checkpoint is None else checkpoint.frozen

    async def outcome(self, request: str, timeout: float) -> Outcome | Pending | Unknown:
        """The outcome of an operation, waiting up to `timeout` seconds for it.

        Before an outcome is returned the fence was read; a failure's delivery was journaled and flushed. A result that
        cannot be read back stops its stream and stays pending: it is never told otherwise than it was recorded.
        """
        self._heard = self._context.config.monotonic()
        entry = self._context.history.find(request)
        if not isinstance(entry, Entry):
            return await self._ended_before(request, timeout)
        if entry.ended is None:
            waiting = self._waiting.setdefault(request, asyncio.get_running_loop().create_future())
            await asyncio.wait({waiting, self._context.ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._context.ended.done():
            self._context.ended.result()
        if entry.ended is None:
            return self._pending(entry)
        try:
            return await self._deliver(entry, entry.ended)
        except Replaced:  # compacted while this call waited
            return await self._ended_before(request, timeout)
        except JournalDamaged as damage:
            return await self._stopped(entry.stream, damage, timeout)

    async def cancel(self, request: str) -> bool:
        """End a sample for which nobody waits, and return whether there is one of that id.

        It ends as failed, which is durable when this returns; one that has ended stays as it is. A repeat is harmless.
        """
        self._heard = self._context.config.monotonic()
        entry = self._context.history.find(request)
        if isinstance(entry, Entry) and isinstance(entry.args, Sample) and entry.stream not in self._context.broken:
            await self._runner.cancel(entry)
            if entry.ended is not None:  # nobody will fetch it, and it need not be kept for longer than what was
                self._compacting.fetched(entry.stream, entry.seq)
        await self._context.journal.check_fence()
        return entry is not None

    async def _stopped(self, stream: str, damage: JournalDamaged, timeout: float) -> Pending:
        """What is told of a damaged result, after `timeout` seconds: whoever hears of it asks again at once."""
        self._context.stop(stream, str(damage))
        await asyncio.wait({self._context.ended}, timeout=timeout)
        if self._context.ended.done():
            self._context.ended.result()
        return _waits_for_mending(stream, str(damage), 0)

    async def _ended_before(self, request: str, timeout: float) -> Outcome | Pending | Unknown:
        """The outcome of an operation of which at most the result is left."""
        journal = self._context.journal
        while isinstance(found := self._context.history.find(request), Kept):
            try:
                async with self._reading:
                    record, body = await journal.read_kept(found.base, found.offset)
                result = given_up(record) if isinstance(record, Lost) else record
                if not isinstance(result, Result) or (result.stream, result.seq) != split_request_id(request):
                    raise JournalDamaged(f"{found.base}: the record at offset {found.offset} is not that of {request}")
            except Replaced:  # by the next base, this moment
                continue
            except JournalDamaged as damage:
                return await self._stopped(request.rpartition(":")[0], damage, timeout)
            await journal.check_fence()
            self._compacting.fetched(result.stream, result.seq)
            return _outcome(result, body)
        await journal.check_fence()
        lost = self._context.history.rolled_back.get(request.rpartition(":")[0])
        if lost is not None:
            return Failed(lost.explanation, "user")
        return Unknown() if found is None else Failed(FORGOTTEN, "user")

    async def _deliver(self, entry: Entry, ended: Ended) -> Outcome | Pending:
        result = ended.result
        if result.ok:
            async with self._reading:
                body = await self._context.journal.read(ended.position)
                await self._context.journal.check_fence()
            self._compacting.fetched(entry.stream, entry.seq)
            return _outcome(result, body)
        if entry.delivered is None:
            deliver = Deliver(entry.stream, entry.seq)
            position, durable = self._context.journal.append(deliver)
            self._context.history.apply(deliver, position)
            self._delivering[entry.request_id] = durable
        delivering = self._delivering.get(entry.request_id)
        if delivering is not None:
            await asyncio.wait({delivering}, timeout=DELIVERY_SECONDS)
            if not delivering.done():
                entry.delivered = None  # this answer tells nothing: what is sent before the next is sent in ignorance
                return self._pending(entry)
            delivering.result()
            self._delivering.pop(entry.request_id, None)
        await self._context.journal.check_fence()
        self._compacting.fetched(entry.stream, entry.seq)
        return _outcome(result, b"")

    async def completions(
        self, sampler: str, client: int, cursor: int, timeout: float
    ) -> tuple[list[Completion], int] | None:
        """What has ended of a client's samples behind a cursor, waiting up to `timeout` seconds for the first.

        Returns it with the cursor of the next question; None if no sample of this sampling session was accepted. The
        fence was read before.
        """
        self._heard = self._context.config.monotonic()
        stream = self._context.history.streams.get(sampler)
        if stream is None:
            await self._context.journal.check_fence()
            return None
        lost = bool(self._context.history.rolled_back)
        found, cursor = self._completions.after(cursor, stream, client, lost=lost)
        if not found and timeout > 0:
            ended = self._sampled.setdefault((sampler, client), asyncio.get_running_loop().create_future())
            await asyncio.wait({ended, self._context.ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._context.ended.done():
                self._context.ended.result()
            found, cursor = self._completions.after(cursor, stream, client, lost=lost)
        await self._context.journal.check_fence()
        return found, cursor

    def _finished(self, entry: Entry, size: int) -> None:
        self._completions.ended(entry, size)
        sampled = self._sampled.pop((entry.stream, entry.seq // BLOCK), None)
        if sampled is not None:
            sampled.set_result(None)
        waiting = self._waiting.pop(entry.request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _pending(self, entry: Entry) -> Pending:
        streams = self._context.history.streams
        before = sum(stream.before(entry.accepted) for stream in streams.values())
        if trouble := reporting.trouble(self._context):
            return Pending("paused_capacity", f"the storage takes no writes, nothing is lost: {trouble}", before)
        broken = self._context.broken.get(entry.stream)
        missing = streams[entry.stream].missing()
        if broken is not None:
            return _waits_for_mending(entry.stream, broken, before)
        if missing is not None:
            waits = f"waiting for operation {missing} of this model, which has not arrived"
            return Pending("active", f"{waits}; after {MINUTES} minutes it is given up", before)
        if self._runner.running is entry:
            alone = self._runner.engine is None
            return Pending("active", "running alone: the training engine died in it before" if alone else "running", 0)
        if entry.request_id in self._runner.sampling:
            return Pending("active", "running", 0)
        if self._runner.engine is None:
            return Pending("paused_capacity", "the training engine is being restored; nothing is lost", before)
        return Pending("active", f"{before} operations of this session were accepted before it", before)

    def model(self, model_id: str) -> ModelInfo | None:
        """A model whose creation has succeeded."""
        self._heard = self._context.config.monotonic()
        return self._context.history.info(model_id)

    def sampler(self, sampling_session_id: str) -> SamplerInfo | None:
        """A sampling session that a save_weights_for_sampler of this session made."""
        return self._context.history.samplers.get(sampling_session_id)

    @property
    def keeping(self) -> Keeping:
        """For a client that removes a checkpoint, or says when it expires."""
        self._heard = self._context.config.monotonic()
        return self._keeping

    def runs(self) -> list[Run]:
        """Every model whose creation has succeeded, those that were rolled back too, and what holds a copy."""
        self._heard = self._context.config.monotonic()
        history = self._context.history
        checkpoints: dict[str, list[Checkpoint]] = {}
        for checkpoint in history.checkpoints.values():
            checkpoints.setdefault(checkpoint.model_id, []).append(checkpoint)
        return [
            Run(
                info,
                history.last_request[name],
                name in self._context.broken,
                tuple(sorted(checkpoints.get(name, ()), key=lambda each: each.stored.time, reverse=True)),
            )
            for name in (*history.models, *history.rolled_back, *history.copied)
            if (info := history.info(name)) is not None
        ]

    def client_sessions(self) -> list[ClientSession]:
        """The sessions of clients that have made something here."""
        self._heard = self._context.config.monotonic()
        return client_sessions(self._context.history)

    async def still_ours(self) -> None:
        """Read the fence, between gathering what no operation answers (models, runs) and telling it."""
        await self._context.journal.check_fence()

    def status(self) -> SessionStatus:
        """The state as plain values."""
        report = reporting.report(self._context, self._runner, self._heard)
        return replace(report, copies=None if self._copies is None else self._copies.report)

    def request_snapshots(self, name: str) -> None:
        """Snapshot every model soon: the pod is about to leave its node. The status tells when that is done."""
        self._runner.request_snapshots(name)

    def take_checkpoints(self, automatic: AutomaticCheckpoints) -> None:
        """Take them so from the next step boundary on, also after a restart in place. OSError: all is as before."""
        self._context.config.remember(automatic)
        self._context.checkpoints = automatic
        log.info("automatic checkpoints changed", every=automatic.every, keep=automatic.keep)

    async def run(self) -> None:
        """Drive the engine until this incarnation ends: raises Fenced or StorageFailed; returns after `drain`."""
        self._main = asyncio.create_task(self._runner.run(), name="runner")
        watch = asyncio.create_task(self._watch(), name="fence and gaps")
        compacting = asyncio.create_task(self._compacting.run(), name="compaction")
        keeping = asyncio.create_task(self._keeping.run(), name="checkpoints")
        copying = asyncio.create_task(self._copy(), name="copies")
        beside = (watch, compacting, keeping, copying)
        tasks: set[asyncio.Future[None]] = {self._main, *beside, self._context.ended}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._main.done() and (self._main.cancelled() or self._main.exception() is None):
                await self._copy_last(tasks - {self._main})
        finally:
            for task in (self._main, *beside):
                task.cancel()
            await asyncio.gather(self._main, *beside, return_exceptions=True)
            await self._runner.snapshots.abandon()
        for task in (self._main, *beside):
            failure = None if task.cancelled() else task.exception()
            if isinstance(failure, Fenced | StorageFailed):
                self._context.end(failure)
            elif failure is not None:
                self._context.end(StorageFailed(f"the session stopped on a defect: {failure!r}"))
                raise failure
        if self._context.ended.done():
            self._context.ended.result()

    async def _copy(self) -> None:
        """Have stored states copied, or, where there is nowhere to copy them to, wait to be cancelled."""
        if self._copies is None or self._copying is None:
            await asyncio.Event().wait()
        else:
            await asyncio.gather(self._copying.run(), self._copies.run())

    async def _copy_last(self, others: set[asyncio.Future[None]]) -> None:
        """Copies of what was written last, for as long as the pod may stay and this incarnation is the newest."""
        copies = self._copies
        if copies is None or self._copying is None or self._copy_until is None:
            return
        last = asyncio.create_task(self._copying.finish(), name="last copies")
        seconds = max(0.0, self._copy_until - asyncio.get_running_loop().time())
        try:
            await asyncio.wait({last, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
        log.info("last copies made", pending=copies.report.pending, error=copies.report.error)

    async def _watch(self) -> None:
        """Notice a newer incarnation, a failed journal and numbers that never arrive, with nothing else to do."""
        while True:
            with self._context.underway.of("the reading of the fence"):
                await self._context.journal.check_fence()
            if self._context.journal.trouble:
                self._gaps.forget()
            else:
                self._give_up_missing()
            await asyncio.sleep(self._context.config.fence_interval)

    def _give_up_missing(self) -> None:
        context = self._context
        for stream, numbers in self._gaps.lost(
            context.history.streams.values(), context.config.monotonic(), self._heard
        ):
            log.error("numbers given up: they never arrived", stream=stream, first=numbers.start, last=numbers[-1])
            for seq in numbers:
                lost = Lost(stream, seq, explanation(seq))
                position, durable = context.journal.append(lost)
                context.history.apply(lost, position, durable=False)
                self._await_durable(request_id(stream, seq), durable)

    async def drain(self, timeout: float, copy_seconds: float = 0.0) -> None:
        """Orderly shutdown within `timeout` seconds: finish or abandon the running operation, snapshot all models.

        What was accepted and did not run is run by the next incarnation. `run` returns, once the copies have what was
        written last, but at most `copy_seconds` from now.
        """
        self._copy_until = asyncio.get_running_loop().time() + copy_seconds
        self._runner.drain()
        if self._main is None:
            return
        _, late = await asyncio.wait({self._main}, timeout=timeout)
        if late:
            log.warning("drain took too long: the running operation is left to the next incarnation", timeout=timeout)
            self._main.cancel()
            await asyncio.wait({self._main})


def _waits_for_mending(stream: str, why: str, before: int) -> Pending:
    return Pending("paused_capacity", f"{stream} is stopped until its storage is mended: {why}", before)


def _outcome(result: Result, body: bytes) -> Succeeded | Failed:
    if result.ok:
        return Succeeded(result.content_type, body)
    assert result.error is not None, "validated with the record"
    assert result.category is not None, "validated with the record"
    return Failed(result.error, result.category)
