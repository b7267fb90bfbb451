"""A client that sends anything, and knows what was acknowledged."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import httpx

from tests.fuzz import answers, bodies, messages

SESSION = "s-0123456789abcdef-0123456789abcdef"
MODEL, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:1"
"""What requests are about until they are sent: a client has a session of its own."""
OPERATIONS = bodies.of_model(MODEL) | bodies.of_sampler(SAMPLER)
QUESTIONS = bodies.questions(MODEL, SAMPLER)


@dataclass
class Client:
    """Sends to what `http` reaches, in a session of its own; `fields` are the names that a refusal may begin with."""

    http: httpx.Client
    session: str
    fields: set[str]
    of_samples: dict[str, str] = field(default_factory=dict)
    """Headers of samples."""
    acknowledged: set[str] = field(default_factory=set)

    @property
    def model(self) -> str:
        """Its model."""
        return MODEL.replace(SESSION, self.session)

    @property
    def sampler(self) -> str:
        """Its sampling session."""
        return SAMPLER.replace(SESSION, self.session)

    def next(self, stream: str) -> int:
        """The lowest number that was not acknowledged; those of a model count from 1."""
        return next(number for number in itertools.count(1) if f"{stream}:{number}" not in self.acknowledged)

    def post(self, name: str, text: str) -> httpx.Response:
        """Send a body of JSON."""
        number = self.next(self.sampler if name == "asample" else self.model)
        ours = text.replace(SESSION, self.session).replace(f'"{bodies.NUMBER}"', str(number))
        headers = {"content-type": "application/json", **(self.of_samples if name == "asample" else {})}
        return self.take(self.http.post(f"/{name}", content=ours.encode(), headers=headers))

    def post_protobuf(self, body: bytes) -> httpx.Response:
        """Send a body of protobuf."""
        ours = messages.numbered(body.replace(SESSION.encode(), self.session.encode()), self.next(self.model))
        headers = {"content-type": "application/x-protobuf"}
        return self.take(self.http.post("/forward_backward", content=ours, headers=headers))

    def take(self, answer: httpx.Response) -> httpx.Response:
        """See that an answer is one, and remember what it promises."""
        answers.check(answer, self.fields)
        if answer.status_code == 200 and answer.headers["content-type"] == "application/json":
            promised = answer.json().get("request_id")
            self.acknowledged |= {promised} if promised else set()
        return answer

    def ended(self) -> dict[str, str | None]:
        """How each operation has ended that was acknowledged and whose turn has come; errors are the client's."""
        turn = self.next(self.model)
        due = [
            request
            for request in sorted(self.acknowledged)
            if request.startswith(self.sampler)
            or (request.startswith(f"{self.model}:") and int(request.rpartition(":")[2]) < turn)
        ]
        found = {
            request: answers.outcome(self.http.post("/retrieve_future", json={"request_id": request}))
            for request in due
        }
        for request, error in found.items():
            assert error is None or answers.names_a_field(error, self.fields), (request, error)
        return found
