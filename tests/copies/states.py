"""A session's root with stored states in it, as the store writes them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from everloop_trainer.copies.bucket import Bucket, Place
from everloop_trainer.copies.copier import Copier, directory
from everloop_trainer.copies.protocol import State
from everloop_trainer.session.identifiers import request_id, storage_id
from everloop_trainer.session.ports import Lora, Manifest, Position, StateKind
from everloop_trainer.session.status import BaseModel
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import claim
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.opening import Claimant, adopt
from everloop_trainer.store.states import manifest_to_json
from tests.copies.store import Store

BASE = BaseModel("smol", "r1", "ab" * 32)
MODEL = "s-0123456789abcdef-0123456789abcdef:train:0"
ID = storage_id(MODEL)
TIME = "2030-01-01T00:00:00Z"


class Root:
    """The storage of one session, without a journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = PosixFiles(path)

    def claim(self, attempt: int = 1, pod: str = "pod-1") -> int:
        """A server takes it; returns its incarnation."""
        adopt(self.files, Claimant("team", "tuned", BASE, attempt, pod))
        return claim(self.files, attempt, pod, TIME)[0].number

    def write(
        self, kind: StateKind, seq: int, *, size: int = 1000, model: str = MODEL, name: str | None = None, seed: int = 0
    ) -> State:
        """One state with random bytes."""
        state = State(kind, storage_id(model), f"1-{seq}")
        data = random.Random(f"{seed}-{model}-{kind}-{seq}").randbytes(size)
        self.files.create(f"{directory(state)}/{layout.STATE}", data)
        manifest = Manifest(
            kind=kind,
            key=state.key,
            model=model,
            operation=request_id(model, seq),
            seq=seq,
            step=seq // 2,
            stands_on=Position(1, 100 + seq),
            base_model=BASE,
            lora=Lora(8, 1, True, True, True),
            alpha=32,
            sha256=hashlib.sha256(data).hexdigest(),
            size=size,
            time=TIME,
            name=name,
        )
        self.files.create(f"{directory(state)}/{layout.MANIFEST}", manifest_to_json(manifest))
        return state

    def data(self, state: State) -> bytes:
        return (self.path / directory(state) / layout.STATE).read_bytes()


def bucket(store: Store, secret: Path, prefix: str, **more: str) -> Bucket:
    place = Place(f"s3://copies/{prefix}", "us-east-1", store.url, credentials_dir=str(secret), **more)
    return Bucket(place, "team/tuned")


def copier(root: Root, where: Bucket, number: int, pause: float = 0.0, now: float = 0.0) -> Copier:
    made = Copier(root.files, where, number, pause, lambda: now)
    made.begin()
    return made
