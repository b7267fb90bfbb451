"""Loading a checkpoint into a model, new or not: from then on the model stands on a snapshot of its own.

The source is read once, by its hash. A load has ended only when the snapshot of the loaded model is durable, so that
no recovery reads the source again: it may be gone by then.
"""

from __future__ import annotations

from everloop_trainer.session.admission import refuse_load
from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import EngineRefused
from everloop_trainer.session.history import Checkpoint
from everloop_trainer.session.operations import LoadWeights
from everloop_trainer.session.ports import ALPHA, Engine, Manifest, Written
from everloop_trainer.session.records import Loaded
from everloop_trainer.session.recovery import stands_on
from everloop_trainer.session.streams import Entry

STAGING = "loading"
"""Name of the engine's model that a checkpoint is read into; no model id is a plain word."""


class Loading:
    """Runs load_weights on an engine. Until it is done the model that it replaces stays as it is."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def source(self, entry: Entry, args: LoadWeights) -> Checkpoint | str:
        """The checkpoint to load, or why it cannot be loaded.

        What another model had saved was settled at acceptance; among the model's own saves the order of its stream
        decides, and that is settled only when it is the load's turn.
        """
        history, config = self._context.history, self._context.config
        found = history.frozen.get(args.source) if args.source is not None else None
        if found is None and args.path.startswith(f"tinker://{entry.stream}/"):
            found = history.checkpoints.get(args.path)
        if found is None:
            return f"path: there is no checkpoint {args.path!r} in this session"
        model = history.models.get(entry.stream)
        present = model.info.lora if model is not None else None
        error = refuse_load(args, found, present, config.base_model, config.max_models, len(history.models))
        return found if error is None else error

    async def run(self, engine: Engine, generation: int, entry: Entry, args: LoadWeights, source: Checkpoint) -> Loaded:
        """Load, and store what was loaded as the model's snapshot.

        Raises as Engine and States do; EngineRefused of category `user` if the checkpoint is not what was saved.
        """
        states, lora = self._context.states, source.lora
        manifest = await states.find("snapshots", entry.stream, entry.request_id)
        if manifest is not None:  # an earlier try got as far as this
            path = states.path("snapshots", entry.stream, manifest.key)
            await engine.restore(entry.stream, path, lora, manifest.sha256, "all")
            return Loaded(source.frozen, manifest.key)
        stored = source.stored
        place = states.place("snapshots", entry.stream, entry.seq, generation)
        path = states.path(stored.kind, source.home, stored.key)
        try:
            await engine.load(STAGING, path, lora, stored.sha256, args.optimizer)
        except EngineRefused as refused:
            if await states.holds(stored.kind, source.home, stored.key, Written(stored.sha256, stored.size)):
                raise
            error = f"path: the storage does not hold {args.path!r} as it was saved: {refused.error}"
            raise EngineRefused(error, "user") from refused
        try:
            written = await engine.write(STAGING, entry.seq, place.path, "all")
            await engine.restore(entry.stream, place.path, lora, written.sha256, "all")
        finally:
            await engine.drop(STAGING)
        manifest = Manifest(
            kind="snapshots",
            key=place.key,
            model=entry.stream,
            operation=entry.request_id,
            seq=entry.seq,
            step=loaded_step(args, source),
            stands_on=stands_on(entry, self._context.history.streams[entry.stream].entries),
            base_model=self._context.config.base_model,
            lora=lora,
            alpha=ALPHA,
            sha256=written.sha256,
            size=written.size,
            time=self._context.config.now(),
        )
        await states.commit(manifest)
        return Loaded(source.frozen, place.key)


def loaded_step(args: LoadWeights, source: Checkpoint) -> int:
    """Optimizer steps of the loaded model: a fresh optimizer has taken none."""
    return source.step if args.optimizer else 0
