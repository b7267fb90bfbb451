"""The sessions of clients, by what they have made here: models and samplers. Pure.

A client's session is no more than its id; what belongs to it bears that in its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from everloop_trainer.session.history import History
from everloop_trainer.session.identifiers import is_sampler, session_of


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One of them.

    Attributes:
        created: when the first of its operations was accepted here, RFC 3339.
        models: those that exist.
        samplers: those that were sampled from here, or made by a save here.
        checkpoints: how many are listed; `bytes` is their size.
    """

    session_id: str
    created: str
    models: tuple[str, ...]
    samplers: tuple[str, ...]
    checkpoints: int
    bytes: int


def client_sessions(history: History) -> list[ClientSession]:
    """All of them, in the order in which they came."""
    models: dict[str, list[str]] = {}
    samplers: dict[str, set[str]] = {}
    created: dict[str, str] = {}
    for stream in history.streams:
        session = session_of(stream)
        begun = history.first_request.get(stream, history.last_request[stream])
        created[session] = min(created.get(session, begun), begun)
        if is_sampler(stream):
            samplers.setdefault(session, set()).add(stream)
        elif history.info(stream) is not None:
            models.setdefault(session, []).append(stream)
    for sampler in history.samplers:
        samplers.setdefault(session_of(sampler), set()).add(sampler)
    sizes: dict[str, list[int]] = {}
    for checkpoint in history.checkpoints.values():
        sizes.setdefault(session_of(checkpoint.model_id), []).append(checkpoint.stored.size)
    return [
        ClientSession(
            session,
            created[session],
            tuple(models.get(session, ())),
            tuple(sorted(samplers.get(session, ()))),
            len(sizes.get(session, ())),
            sum(sizes.get(session, ())),
        )
        for session in created
    ]
