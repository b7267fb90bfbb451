"""One leg of a soak: kills at random under one loop, then as many steps unbroken, and the comparison."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from demo import adapters, install
from demo.loop import Loop
from demo.moments import running
from tests.e2e.waiting import eventually
from tests.e2e.world import Everloop
from tests.prepared import client_python
from tests.soak.ledger import difference, done_twice
from tests.soak.victims import Victims

LONGEST_PAUSE_SECONDS = 3.0
LINGER_SECONDS = 0.4
RECOVERY_SECONDS = 600.0
AT_ONCE = 0.2
"""Share of kills that fall into whatever the kill before left."""
SECOND_VICTIM = 4
"""One kill of so many takes a second victim in the same moment."""
CLIENT = Path(__file__).parent / "clients" / "varied.py"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill; ``seconds`` until the loop was told its next result, None where that was not waited for."""

    number: int
    victims: tuple[str, ...]
    during: str
    seconds: float | None


@dataclass
class Run:
    """One run of the loop, and where it keeps what it was told."""

    loop: Loop
    ledger: Path

    def told(self) -> list[str]:
        """Lines of the ledger."""
        return self.ledger.read_text().splitlines()

    def check(self) -> None:
        """Raise RuntimeError with the loop's own words if it has ended."""
        assert self.loop.process is not None
        if self.loop.process.poll() is not None:
            list(self.loop.follow())
            raise RuntimeError("the loop ended by itself")

    def finish(self) -> str:
        """Wait for its end; the path that it saved at last. Raises RuntimeError with its own words."""
        return next(line.split()[1] for line in list(self.loop.follow()) if line.startswith("saved "))


@dataclass
class Struck:
    """What a leg has killed so far."""

    victims: Counter[str] = field(default_factory=Counter)
    in_operation: int = 0
    together: int = 0
    """Kills of two victims in one moment."""


def start(everloop: Everloop, name: str, seed: int, *arguments: str) -> Run:
    """Start the loop."""
    ledger = everloop.directory / f"{name}.ledger"
    ledger.write_text("")  # the client appends, and another leg may have used this name
    given = (
        "--base-model", install.BASE_MODEL, "--seed", str(seed), "--name", name, "--ledger", str(ledger),
        "--chunk", str(everloop.chunk_datums()), *arguments,
    )  # fmt: skip
    session, log = everloop.session, everloop.directory / f"{name}.log"
    run = Run(Loop(Path(client_python()), CLIENT, session.url, session.key, log, given), ledger)
    run.loop.start()
    return run


def strike(everloop: Everloop, victims: Victims, rng: random.Random, wanted: int) -> tuple[tuple[str, ...], str]:
    """Kill so many random victims in one moment after a random while; their names, and what ran then."""
    struck: list[str] = []
    during = ""
    while len(struck) < wanted:
        time.sleep(rng.uniform(0.0, LONGEST_PAUSE_SECONDS))  # the moment is what is drawn, not waited for
        drawn = rng.sample(victims.names, len(victims.names))
        now = running(everloop.session.journal())
        struck += victims.strike(drawn, wanted - len(struck))
        during = f"{now.kind} {now.number}" if now else ""
    return tuple(struck), during


def wait_told(run: Run, known: int) -> None:
    """Until the loop was told more than `known` results."""

    def more() -> bool:
        run.check()
        return len(run.told()) > known

    eventually(more, "the loop's next result", seconds=RECOVERY_SECONDS)


def drive(everloop: Everloop, run: Run, kills: int, rng: random.Random, report: Callable[[Kill], None]) -> Struck:
    """Kill so often while the loop runs."""
    victims, struck = Victims(everloop.session, rng), Struck()
    wait_told(run, 0)
    for number in range(1, kills + 1):
        hit, during = strike(everloop, victims, rng, 1 if number % SECOND_VICTIM else 2)
        killed, known = time.monotonic(), len(run.told())
        seconds = None
        if rng.random() >= AT_ONCE or number == kills:
            wait_told(run, known)
            seconds = time.monotonic() - killed
        victims.bring_back()
        struck.victims.update(hit)
        struck.in_operation += bool(during)
        struck.together += len(hit) > 1
        report(Kill(number, hit, during, seconds))
    return struck


def compare(everloop: Everloop, broken: Run, path: str, seed: int) -> tuple[int, str]:
    """Run as many steps unbroken; their number, and in words what differs, empty if nothing does."""
    twice = done_twice(everloop.session.journal())
    if twice:
        return 0, f"done twice: {', '.join(twice)}"
    steps = sum(json.loads(line)["event"] == "step" for line in broken.told())
    plain = start(everloop, "unbroken", seed, "--steps", str(steps))
    try:
        plain_path = plain.finish()
    finally:
        plain.loop.stop()
    differs = difference(broken.told(), plain.told())
    first, second = (adapters.fingerprint(everloop.session.adapter(each)) for each in (path, plain_path))
    if first != second:
        differs += f" adapter {first} is not {second}"
    return steps, differs.strip()
