"""What a client knows of its calls: enough to say afterwards what it had to be answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from everloop_trainer.session import operations as ops
from everloop_trainer.session.outcomes import Failed, Outcome, Pending, Succeeded, Unknown
from everloop_trainer.session.service import SessionService
from tests.session.world import Over

NEVER = 1 << 60


@dataclass
class Call:
    """What a client knows of one number; moments count what the client did.

    `sent`: first on its way. `acknowledged`: that was answered. `asked`: the outcome may first have been on its way
    back. `told`: the outcome was answered.
    """

    operation: ops.Operation
    sent: int
    acknowledged: int = NEVER
    asked: int = NEVER
    told: int = NEVER
    outcome: Succeeded | Failed | None = None

    def says(self, words: str) -> bool:
        return isinstance(self.outcome, Failed) and words in self.outcome.error

    @property
    def given_up(self) -> bool:
        words = f"seq_id: operation {self.operation.seq} did not arrive"
        return isinstance(self.outcome, Failed) and self.outcome.error.startswith(words)

    @property
    def kind(self) -> str:
        """What it was to do; a number that was given up counts as a forward_backward."""
        args = ops.Refused("forward_backward", "") if self.given_up else self.operation.args
        return args.operation if isinstance(args, ops.Refused) else args.KIND


@dataclass
class Calls:
    """A client that sends numbers, in any order, again and to anybody, and holds everybody to what they answered."""

    known: dict[str, Call] = field(default_factory=dict)
    moment: int = 0

    def skip(self, operation: ops.Operation) -> None:
        """A number that is taken but not sent yet."""
        self.known.setdefault(operation.request_id, Call(operation, NEVER))

    async def send(self, service: SessionService, operation: ops.Operation) -> None:
        """Send a number; a repeat may have another content."""
        self.skip(operation)
        call = self.known[operation.request_id]
        call.sent = min(call.sent, self._next())
        await service.accept(operation)
        call.acknowledged = min(call.acknowledged, self._next())

    async def ask(self, service: SessionService, request: str, timeout: float) -> Outcome | Pending | Unknown:
        """Ask for an outcome. It is never another than before, and no acknowledged number is unknown."""
        call, moment = self.known[request], self._next()
        acknowledged = call.acknowledged != NEVER
        try:
            outcome = await service.outcome(request, timeout)
        except Over:
            call.asked = min(call.asked, moment)
            raise
        if isinstance(outcome, Unknown):
            assert not acknowledged, f"{request} was acknowledged and is unknown"
        elif not isinstance(outcome, Pending):
            assert call.outcome in (None, outcome), f"{request} was told otherwise: {call.outcome}, now {outcome}"
            call.outcome, call.asked, call.told = outcome, min(call.asked, moment), min(call.told, self._next())
        elif service.status().storage_error:  # what it is to be told of may be in the journal already
            call.asked = min(call.asked, moment)
        return outcome

    def _next(self) -> int:
        self.moment += 1
        return self.moment


def saved_as(operation: ops.Operation) -> str | None:
    """The path or the sampling session under which a save is found."""
    args = operation.args
    if isinstance(args, ops.SaveWeights):
        return f"tinker://{operation.stream}/weights/{args.name}"
    if not isinstance(args, ops.SaveWeightsForSampler):
        return None
    if args.name is None:
        return f"{operation.stream.partition(':')[0]}:sample:{args.sampling_session_seq_id}"
    return f"tinker://{operation.stream}/sampler_weights/{args.name}"
