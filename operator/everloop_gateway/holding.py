"""What a client that must wait is told, and when. Pure decisions over seconds.

The bounds are those of the tinker SDK 0.38: it gives up on a refused submit after about 5 minutes, reads a silent
answer for 60 s (45 s where it polls), ends any attempt at 120 s and repeats it ten times, but ``save_*`` never.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

STREAM_AFTER_SECONDS = 5.0
SPACE_EVERY_SECONDS = 10.0
POLL_ANSWER_SECONDS = 30.0
# A poll that reached its pod may use up the pod's own 30 s, but must end before the client's 45 s.
POLL_LIMIT_SECONDS = 40.0
SAMPLE_ANSWER_SECONDS = 20.0
PAUSE_ANSWER_SECONDS = 30.0

# A save that no pod has taken after so long is kept at the API server and acknowledged (`intents`).
INTENT_AFTER_SECONDS = 10.0
# What a streamed answer cannot carry any further gets 402 ("paused"), which the SDK repeats every 5 s for as long as
# the client configuration says. save_* has no inner retries and is lost at 5 minutes, and with it paused for longer
# at the first connection that breaks: for saves it is the last resort, while the API server is away as well. The
# others have their ten retries anew after each 402; without it they are lost at 22 minutes. create_* raises at 402.
SAVE_PAUSE_OUTAGE_SECONDS = 60.0
PAUSE_OUTAGE_SECONDS = 600.0
MAX_PAUSE_SECONDS = 30 * 86400

REQUEST_TIMEOUT = 408
PAYMENT_REQUIRED = 402
TOO_MANY_REQUESTS = 429


class Kind(Enum):
    """Kinds of calls, by how the SDK repeats them."""

    CREATE = "create"
    QUERY = "query"
    TRAIN = "train"
    SAVE = "save"
    SAMPLE = "sample"
    POLL = "poll"
    POLL_ALL = "poll_all"

    @property
    def polls(self) -> bool:
        """Whether it waits for something to end, and so may take as long as the SDK lets a poll take."""
        return self in (Kind.POLL, Kind.POLL_ALL)


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Say nothing yet; decide anew after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BeginStream:
    """Begin a 200 whose body is white space until the JSON is there."""


@dataclass(frozen=True, slots=True)
class TellToRepeat:
    """Answer with this status, on which the client repeats the call without end."""

    status: int


Step = KeepWaiting | BeginStream | TellToRepeat


def next_step(kind: Kind, waited: float, outage: float, sent: bool) -> Step:
    """Decide for a call without an answer.

    Args:
        kind: how the SDK repeats it.
        waited: seconds since it came in.
        outage: seconds since what it waits for, its session pod or the Kubernetes API, last served this replica.
        sent: it has just been sent to its pod, which has not answered yet.
    """
    if kind.polls:
        limit = POLL_LIMIT_SECONDS if sent else POLL_ANSWER_SECONDS
        return _until(limit, waited, TellToRepeat(REQUEST_TIMEOUT))
    if kind is Kind.SAMPLE:
        return _until(SAMPLE_ANSWER_SECONDS, waited, TellToRepeat(TOO_MANY_REQUESTS))
    if waited < STREAM_AFTER_SECONDS:
        return KeepWaiting(STREAM_AFTER_SECONDS - waited)
    if outage >= _pause_outage(kind):
        return _until(PAUSE_ANSWER_SECONDS, waited, TellToRepeat(PAYMENT_REQUIRED))
    return BeginStream()


def is_definitive(status: int) -> bool:
    """Is a session pod's status the answer to the client?

    421 comes from a fenced server or another incarnation, 401 and 403 are about the gateway's own token (the
    client's identity is no matter of the pod), and after a 5xx the same numbered request can always be repeated.
    """
    return status < 500 and status not in (401, 403, 421)


def _pause_outage(kind: Kind) -> float:
    if kind is Kind.SAVE:
        return SAVE_PAUSE_OUTAGE_SECONDS
    if kind in (Kind.TRAIN, Kind.QUERY):
        return PAUSE_OUTAGE_SECONDS
    return float("inf")


def _until(limit: float, waited: float, step: Step) -> Step:
    return KeepWaiting(limit - waited) if waited < limit else step
