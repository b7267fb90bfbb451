"""Finding the TrainingSession for a new model in the cluster, and making it from the catalogue where there is none."""

from __future__ import annotations

import time
from contextlib import suppress

import structlog

from everloop_gateway.catalogue import session_manifest
from everloop_gateway.cluster import Cluster
from everloop_gateway.ids import shorten
from everloop_gateway.keys import Principal
from everloop_gateway.kube import ApiRefused, pause
from everloop_gateway.placement import Create, Unplaceable, place
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import SessionView, Wait
from everloop_gateway.upstream import Progress, until_available
from everloop_operator.api import names

LOOK_AGAIN_SECONDS = 1.0
MISTAKEN_SECONDS = 4.0
"""For how long a claim may be missing, made a moment after its session; an answer is streamed only after that."""
DENIED_SECONDS = 3.0
"""How long something has to be denied: an API server that has just begun denies what it grants a moment later."""
UNAUTHORIZED, FORBIDDEN, CONFLICT = 401, 403, 409

log = structlog.get_logger(__name__)


class Creation:
    """Gives each new model its TrainingSession. Keeps nothing: whoever repeats the call finds what was made."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def session_for(
        self, principal: Principal, base_model: str, progress: Progress, *, needs_slot: bool
    ) -> SessionView:
        """The TrainingSession for a new model (needs_slot) or sampling session; made if there is none. Raises Refusal.

        Waits for the Kubernetes API for ever, and may be cancelled at any time.
        """
        cluster, namespace = self._cluster, principal.namespace
        progress.outage = cluster.api_outage_seconds

        def decide(sessions: list[SessionView]) -> SessionView | Create | Wait:
            entries, only = cluster.catalogue.entries, principal.session
            return place(base_model, namespace, sessions, entries, needs_slot=needs_slot, only=only)

        found: SessionView | Create | Wait | None
        right, denied = time.monotonic(), 0.0
        try:
            while True:
                change = cluster.sessions.change(None)
                found = None
                with suppress(Unplaceable):
                    found = decide(cluster.sessions.in_namespace(namespace))
                if found is None or isinstance(found, Create):
                    # The watch may be behind: nothing is made or refused but from what the API server says now.
                    found = decide(await until_available(lambda: cluster.list_sessions(namespace), progress))
                if isinstance(found, SessionView):
                    return found
                if not (isinstance(found, Wait) and found.mistaken):
                    right = time.monotonic()
                elif time.monotonic() - right >= MISTAKEN_SECONDS:
                    raise Unplaceable(f"base_model {shorten(base_model)!r}: {found.reason}")
                if isinstance(found, Create):
                    denial = await self._create(principal, base_model, found, progress)
                    if not denial:
                        denied = 0.0
                        continue
                    denied = denied or time.monotonic()
                    if time.monotonic() - denied >= DENIED_SECONDS:
                        raise Refusal(FORBIDDEN, denial)
                    progress.waits(denial)
                    await pause(change, LOOK_AGAIN_SECONDS)
                else:
                    progress.waits(found.reason)
                    await pause(change, LOOK_AGAIN_SECONDS)
        except Unplaceable as error:
            raise Refusal(400, str(error)) from None

    async def _create(self, principal: Principal, asked: str, wanted: Create, progress: Progress) -> str:
        """Make it, or find that somebody else just has: either way it is in the next list.

        Returns why it is denied, "" if it is not. Raises Refusal.
        """
        cluster, namespace = self._cluster, principal.namespace
        where = f"{names.TRAINING_SESSION_PLURAL}.{names.GROUP} in namespace {namespace!r}"
        missing = f"base_model {shorten(asked)!r}: no TrainingSession in namespace {namespace!r} has room for it"
        if not principal.subject:
            raise Refusal(FORBIDDEN, f"{missing}, and to create one the API key needs a subject")
        if not await until_available(lambda: cluster.may_create_session(principal), progress):
            return f"{missing}, and subject {principal.subject!r} must not create {where}"
        manifest = session_manifest(wanted.base_model, wanted.template, namespace, wanted.name)
        try:
            # The right to ask, just used, comes with that to create: a 403 is from a quota or a rule of admission.
            created = await until_available(
                lambda: cluster.create_session(namespace, manifest), progress, held=(UNAUTHORIZED,)
            )
        except ApiRefused as error:
            if error.status == CONFLICT:
                # A quota was being counted at the same moment.
                return ""
            log.error("session refused", namespace=namespace, session=wanted.name, error=error.message)
            refused = f"{missing}, and the one that the catalogue describes is refused: {error.message}"
            if error.status == FORBIDDEN:
                return refused
            raise Refusal(400, refused) from None
        event = "session created" if created else "session was created by another"
        log.info(event, namespace=namespace, session=wanted.name, subject=principal.subject)
        return ""
