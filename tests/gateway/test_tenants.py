"""Two tenants at one gateway: what belongs to one of them is, for the other, as if it had never been."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from kubernetes.aio import client as kubernetes
from starlette.routing import Route

from everloop_gateway import kube, upstream
from everloop_gateway.app import App
from everloop_gateway.calls import Calls
from everloop_gateway.checkpoints import Checkpoints
from everloop_gateway.cluster import Cluster as Known
from everloop_gateway.downloads import ROUTE as DOWNLOADS
from everloop_gateway.downloads import Downloads
from everloop_gateway.intents import Intents
from everloop_gateway.listings import Listings
from everloop_gateway.settings import Settings
from everloop_gateway.waking import Waker
from tests.gateway.fake_pod import PROTOBUF, wire_schema
from tests.gateway.test_custom_losses import request as custom_loss
from tests.gateway.world import Cluster, GatewayProcess, Processes, Tenant

PREFIX = "/api/v1"
NAMELESS = {
    *("/healthz", "/readyz", f"{PREFIX}/healthz"),
    *(f"{PREFIX}/{name}" for name in ("client/config", "client/dynamic_config", "telemetry", "create_session")),
    *(f"{PREFIX}/{name}" for name in ("get_server_capabilities", "training_runs", "checkpoints")),
    *(f"{PREFIX}/{name}" for name in ("sessions", "sessions/search", "{rest:path}")),
}
"""Routes whose calls name nothing that belongs to anybody."""
Call = tuple[str, str, dict[str, Any]]
"""Method, path below the prefix, and options of httpx."""
_numbers = itertools.count(100)


@dataclass(frozen=True)
class Names:
    """A client session, and what it has made."""

    session: str

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    @property
    def request(self) -> str:
        return f"{self.model}:1"

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/saved"


def calls(own: Names, other: Names) -> Mapping[str, Sequence[Call]]:
    """By route: each way in which a call of a client with `own` can name something of `other`."""

    def post(name: str, **body: Any) -> Call:
        return "POST", name, {"json": body}

    def number(field: str) -> dict[str, int]:
        return {field: next(_numbers)}

    def operation(model: str) -> dict[str, Any]:
        return {"model_id": model, **number("seq_id")}

    message = wire_schema().ForwardBackwardRequest(**operation(other.model), loss_fn="cross_entropy")
    protobuf = {"content": message.SerializeToString(), "headers": {"Content-Type": PROTOBUF}}
    new, sampling = "model_seq_id", "sampling_session_seq_id"
    external = f"training_runs/{other.model}/checkpoints/external_weights/out"
    one, ttl = "training_runs/{run_id}/checkpoints/{kind}/{name}", {"ttl_seconds": 3600}
    named: dict[str, list[Call]] = {
        "session_heartbeat": [post("session_heartbeat", session_id=other.session)],
        "sessions/{session_id}": [("GET", f"sessions/{other.session}", {})],
        "sessions/{session_id}/finish": [post(f"sessions/{other.session}/finish")],
        "samplers/{sampler_id}": [("GET", f"samplers/{other.sampler}", {})],
        "training_runs/{run_id}": [
            ("GET", f"training_runs/{other.model}", {}),
            ("GET", f"training_runs/{other.model}?access_scope=accessible", {}),
        ],
        "training_runs/{run_id}/checkpoints": [("GET", f"training_runs/{other.model}/checkpoints", {})],
        "training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls": [
            ("GET", f"{external}/external_weights_urls", {})
        ],
        f"{one}/archive": [("GET", f"training_runs/{other.model}/checkpoints/weights/saved/archive", {})],
        one: [("DELETE", f"training_runs/{other.model}/checkpoints/weights/saved", {})],
        f"{one}/publish": [
            ("POST", f"training_runs/{other.model}/checkpoints/weights/saved/publish", {}),
            ("DELETE", f"training_runs/{other.model}/checkpoints/weights/saved/publish", {}),
        ],
        f"{one}/ttl": [("PUT", f"training_runs/{other.model}/checkpoints/weights/saved/ttl", {"json": ttl})],
        "create_model": [post("create_model", session_id=other.session, **number(new), base_model="org/small")],
        "create_sampling_session": [
            post("create_sampling_session", session_id=other.session, base_model="org/small", **number(sampling)),
            post("create_sampling_session", session_id=own.session, model_path=other.path, **number(sampling)),
        ],
        "create_custom_loss": [("POST", "create_custom_loss", {"json": custom_loss(other.session)})],
        "get_info": [post("get_info", model_id=other.model)],
        "weights_info": [post("weights_info", tinker_path=other.path)],
        "forward_backward": [("POST", "forward_backward", protobuf)],
        "optim_step": [post("optim_step", **operation(other.model))],
        "load_weights": [
            post("load_weights", session_id=other.session, path=own.path, **number(new), optimizer=True),
            post("load_weights", session_id=own.session, path=other.path, **number(new), optimizer=True),
            post("load_weights", **operation(other.model), path=own.path, optimizer=True),
            post("load_weights", **operation(own.model), path=other.path, optimizer=True),
        ],
        "save_weights": [post("save_weights", **operation(other.model), path="new")],
        "save_weights_for_sampler": [
            post("save_weights_for_sampler", **operation(other.model), path="new"),
            post("save_weights_for_sampler", **operation(other.model), **number(sampling)),
        ],
        "save_weights_external": [post("save_weights_external", **operation(other.model), path="new")],
        "asample": [post("asample", sampling_session_id=other.sampler, **number("seq_id"))],
        "retrieve_future": [post("retrieve_future", request_id=other.request)],
        "retrieve_futures": [post("retrieve_futures", target={"sampling_session_id": other.sampler})],
        "copy_weights": [
            post("copy_weights", source_path=other.path, session_id=own.session, **number(new)),
            post("copy_weights", source_path=own.path, session_id=other.session, **number(new)),
        ],
        "cancel_future": [post("cancel_future", request_id=other.request)],
    }
    return {f"{PREFIX}/{route}": ways for route, ways in named.items()}


@dataclass(frozen=True)
class Member:
    """A tenant, a client with a key of its namespace, and what that has made."""

    tenant: Tenant
    client: httpx.Client
    names: Names


@pytest.fixture
def members(
    cluster: Cluster, gateway: GatewayProcess, processes: Processes, address: Callable[[], str]
) -> Iterator[tuple[Member, Member]]:
    """Two, each with a model, a checkpoint and a sampling session."""
    tenants = cluster.tenant(), cluster.tenant()
    keys = [cluster.key(tenant.namespace) for tenant in tenants]
    with gateway.session(keys[0]) as one, gateway.session(keys[1]) as two:
        made = tuple(
            Member(tenant, client, Names(session))
            for tenant, (client, session) in zip(tenants, (one, two), strict=True)
        )
        for member in made:
            member.tenant.serve(member.tenant.start_pod(processes, address()))
            make(member)
        yield made[0], made[1]


def make(member: Member) -> None:
    """Its model, checkpoint and sampling session."""
    client, names = member.client, member.names
    body = {"session_id": names.session, "model_seq_id": 0, "base_model": "org/small"}
    assert client.post("/create_model", json=body).json() == {"request_id": f"{names.model}:0"}
    saved = client.post("/save_weights", json={"model_id": names.model, "seq_id": 1, "path": "saved"}).json()
    assert client.post("/retrieve_future", json=saved).json() == {"path": names.path}
    body = {"session_id": names.session, "sampling_session_seq_id": 0, "model_path": names.path}
    assert client.post("/create_sampling_session", json=body).json()["sampling_session_id"] == names.sampler


def routes() -> list[Route]:
    """The router's own table."""
    return asyncio.run(_routes())


async def _routes() -> list[Route]:
    api, http = kube.Kube(kubernetes.ApiClient(kubernetes.Configuration())), upstream.http_client()
    try:
        known = Known(api, Settings("127.0.0.1", "release", (), "INFO", metrics=False))
        pods = upstream.Upstream(known.sessions, known.bindings, http, known.master, Waker(known.wake))
        served = Calls(known, pods, Intents(api, "release", known.bindings, pods), stand_ins=False)
        listings, checkpoints = Listings(known, pods, served), Checkpoints(pods, served)
        downloads = Downloads(known, pods, served)
        return App(known, served, listings, checkpoints, downloads, asyncio.Event(), batched_polls=False).routes()
    finally:
        await http.close()
        await api.close()


def test_every_route_but_probes_and_signed_urls_wants_a_key(gateway: GatewayProcess) -> None:
    """By the router's own table, so that no route is forgotten."""
    for route in routes():
        path = re.sub(r"\{\w+(:path)?\}", "x", route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            answer = httpx.request(method, gateway.url + path, trust_env=False)
            expected = (200, {"status": "ok"}) if path.endswith("z") else (401, {"detail": "X-API-Key: required"})
            if route.path == DOWNLOADS:
                expected = (403, {"detail": "mac: this URL was not given out here"})
            assert (answer.status_code, answer.json()) == expected, (method, path)


def told(client: httpx.Client, call: Call) -> tuple[int, str]:
    """What a call comes to, in the end: 400 also for an operation that was accepted and then failed."""
    method, path, options = call
    answer = client.request(method, f"/{path}", **options)
    if answer.is_success and path != "retrieve_futures" and "request_id" in answer.text:
        answer = client.post("/retrieve_future", json=answer.json())
    failed = answer.is_success and '"category"' in answer.text
    return 400 if failed else answer.status_code, answer.text


def test_what_is_another_tenants_is_as_if_it_had_never_been(members: tuple[Member, Member]) -> None:
    """Every route that names something: the same refusal for what the other has made as for what nobody has."""
    mine, theirs = members
    own, other = mine.names, theirs.names
    invented = replace(other, session="s-" + "0123456789abcdef" + other.session[-17:])
    # What a signed URL opens has tests of its own (test_downloads.py): it is no key's.
    assert calls(own, other).keys() | NAMELESS | {DOWNLOADS} == {route.path for route in routes()}
    before = theirs.tenant.ledger_path.read_text()
    found = itertools.chain.from_iterable(calls(own, other).values())
    sought = itertools.chain.from_iterable(calls(own, invented).values())
    for real, none in zip(found, sought, strict=True):
        status, text = told(mine.client, real)
        assert 400 <= status < 500, (real, text)
        assert (status, text.replace(other.session, invented.session)) == told(mine.client, none), real
    assert theirs.tenant.ledger_path.read_text() == before
    named = [record for record in mine.tenant.ledger() if other.session in (record.get("weights") or "")]
    assert named == []
    for listing in ("training_runs", "checkpoints"):
        shown = mine.client.get(f"/{listing}").json()
        assert shown["cursor"]["total_count"] == 1, shown
        assert own.session in str(shown)
        assert other.session not in str(shown)


def test_the_owner_is_served_by_each_of_these_calls(members: tuple[Member, Member]) -> None:
    """So that it is the name that they were refused for."""
    own = members[0].names
    for call in itertools.chain.from_iterable(calls(own, own).values()):
        status, text = told(members[0].client, call)
        assert status == 200, (call, text)


LOOK_ALIKES = str.maketrans("s0123456789", "\u0455" + "".join(chr(0xFF10 + digit) for digit in range(10)))
"""A Cyrillic letter, and digits of full width."""


def spellings(own: str, other: str) -> list[str]:
    """A name of somebody else's, written as something that may be read as it behind a check, or as one's own."""
    return [
        *(f"{own}/../{other}", f"{own}/../../{other}", f"{own}//{other}", f"../{other}", f"./{other}", f"/{other}"),
        *(
            f"{other}/",
            f"{other}/.",
            f"{other}\x00",
            f"{other}\x00{own}",
            f"{own}\x00{other}",
            f"{other}\n",
            f" {other}",
        ),
        *(f"{other} ", f"{other}?", f"{other}#{own}", f"{own}?{other}", f"{own};{other}", f"{own},{other}"),
        *(f"{own}\\..\\{other}", f"{own}%2f..%2f{other}", f"%2e%2e%2f{other}", f"{other}%00", f"{own}\r\nX-A: {other}"),
        *(other.upper(), other.translate(LOOK_ALIKES), f"{other}\u200b", f"\ufeff{other}", f"{other}\ud800"),
        *(f"{other}{'0' * 5_000}", "." * 300, "..", ".", f"{other}:{own}", f"{own}{other}"),
    ]


def in_a_path(spelling: str) -> Iterator[str]:
    """As a client may write it in a request's target: with and without what there has a meaning of its own."""
    raw = spelling.encode(errors="surrogatepass")
    yield "".join(f"%{byte:02x}" for byte in raw)
    if all(0x20 < byte < 0x7F for byte in raw) and "?" not in spelling:
        yield spelling
        yield spelling.replace("..", "%2e%2e").replace("/", "%2f")


def ask(gateway: GatewayProcess, key: str, method: str, target: str) -> int:
    """The status of a request with this very target, which no client library has tidied."""
    address, port = gateway.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(address, int(port), timeout=30)
    try:
        connection.putrequest(method, PREFIX + target)
        connection.putheader("X-API-Key", key)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_no_spelling_of_a_target_leads_to_another_tenant(
    members: tuple[Member, Member], gateway: GatewayProcess
) -> None:
    """Dots, slashes, NUL, encodings, look-alikes and length in a request's path: refused, and nobody's pod is asked."""
    mine, theirs = members
    key = mine.client.headers["X-API-Key"]
    before = [member.tenant.ledger_path.read_text() for member in members]
    patterns = (
        ("GET", "/training_runs/{}", "model"),
        ("GET", "/training_runs/{}/checkpoints", "model"),
        ("GET", "/samplers/{}", "sampler"),
        ("POST", "/sessions/{}/finish", "session"),
        ("GET", "/sessions/{}", "session"),
        ("DELETE", "/training_runs/{}/checkpoints/weights/saved", "model"),
    )
    for method, pattern, kind in patterns:
        for spelling in spellings(getattr(mine.names, kind), getattr(theirs.names, kind)):
            for written in in_a_path(spelling):
                status = ask(gateway, key, method, pattern.format(written))
                assert status in (400, 403, 404, 405), (pattern, written, status)
    assert ask(gateway, key, "GET", f"/training_runs/{'a' * 60_000}") == 404
    assert [member.tenant.ledger_path.read_text() for member in members] == before


def test_no_spelling_of_a_name_leads_to_another_tenant(members: tuple[Member, Member]) -> None:
    """The same in a body: models, samplers, requests and checkpoints, refused at once."""
    mine, theirs = members
    own, other = mine.names, theirs.names
    before = [member.tenant.ledger_path.read_text() for member in members]

    def refused(name: str, **body: Any) -> None:
        text = json.dumps(body)  # as text, for what no UTF-8 can say
        answer = mine.client.post(f"/{name}", content=text, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (name, body, answer.text)

    for spelling in spellings(own.model, other.model):
        refused("optim_step", model_id=spelling, seq_id=1)
        refused("get_info", model_id=spelling)
        refused("weights_info", tinker_path=f"tinker://{spelling}/weights/saved")
    for spelling in spellings(own.sampler, other.sampler):
        refused("asample", sampling_session_id=spelling, seq_id=1)
    for spelling in spellings(own.request, other.request):
        refused("retrieve_future", request_id=spelling)
    for spelling in spellings("saved", f"{other.model}/weights/saved"):
        path = f"tinker://{own.model}/weights/{spelling}"
        if spelling.strip("."):
            refused("weights_info", tinker_path=path)
            refused("load_weights", session_id=own.session, model_seq_id=1, path=path, optimizer=True)
    assert [member.tenant.ledger_path.read_text() for member in members] == before


def test_what_is_asked_of_a_pod_is_not_up_to_the_client(
    members: tuple[Member, Member], gateway: GatewayProcess
) -> None:
    """Neither by a Host that holds a path, nor by headers of the kind that the gateway sets."""
    mine = members[0]
    own = mine.names
    for host in ("x/snapshot?", "x/api/v1/retrieve_future#", "x/status?y", "x"):
        number = next(_numbers)
        body = {"model_id": own.model, "seq_id": number, "request_id": members[1].names.request}
        headers = {"Host": host, "X-Everloop-Weights": members[1].names.path, "X-Everloop-Pod-UID": "another"}
        answer = mine.client.post("/optim_step", json=body, headers=headers)
        assert answer.json() == {"request_id": f"{own.model}:{number}"}, host
    asked = [record for record in mine.tenant.ledger() if "call" in record][-4:]
    assert [(record["call"], record["weights"]) for record in asked] == [("optim_step", None)] * 4
