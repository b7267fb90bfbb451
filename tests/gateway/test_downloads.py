"""Files of external weights: who is told their URLs, what these open, and what a client sees of a pod that dies."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from everloop_operator.api import tokens
from tests.gateway.fake_pod import CONTENT, FILE, KEY
from tests.gateway.world import MASTER, Cluster, GatewayProcess, PodProcess, Processes, Tenant, wait_for
from tests.networks import new_address

Address = Callable[[], str]


@dataclass(frozen=True)
class Saved:
    """External weights in a tenant's pod, and the key that has saved them."""

    tenant: Tenant
    pod: PodProcess
    owner: httpx.Client
    run: str

    @property
    def urls(self) -> str:
        return f"/training_runs/{self.run}/checkpoints/external_weights/out/external_weights_urls"

    def url(self) -> str:
        """A URL of the file, as its owner is told."""
        told = self.owner.get(self.urls).json()["urls"]
        assert told.keys() == {FILE}
        return str(told[FILE])

    def asked(self) -> list[dict[str, Any]]:
        """What was asked of pods for the file."""
        return [record for record in self.tenant.ledger() if "file" in record]


@pytest.fixture(scope="module")
def saved(cluster: Cluster, gateway: GatewayProcess) -> Iterator[Saved]:
    """In a pod that no test harms."""
    processes = Processes()
    with in_a_pod_of(cluster, gateway, processes) as saved:
        yield saved
    processes.stop()


@pytest.fixture
def mortal(cluster: Cluster, gateway: GatewayProcess, processes: Processes) -> Iterator[Saved]:
    """In a pod to be killed."""
    with in_a_pod_of(cluster, gateway, processes) as saved:
        yield saved


@contextmanager
def in_a_pod_of(cluster: Cluster, gateway: GatewayProcess, processes: Processes) -> Iterator[Saved]:
    tenant = cluster.tenant()
    pod = tenant.start_pod(processes, new_address())
    tenant.serve(pod)
    with gateway.session(cluster.key(tenant.namespace)) as (owner, session_id):
        run = f"{session_id}:train:0"
        owner.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        answer = owner.post("/save_weights_external", json={"model_id": run, "seq_id": 1, "path": "out"})
        assert answer.json() == {"request_id": f"{run}:1"}
        yield Saved(tenant, pod, owner, run)


def get(url: str, **headers: str) -> httpx.Response:
    """As whoever has the URL, and no key."""
    return httpx.get(url, headers=headers, trust_env=False)


def test_a_url_opens_its_file_and_any_part_of_it(saved: Saved, gateway: GatewayProcess) -> None:
    """Without a key, at the address that the client used; the answer can be cached nowhere, and its end be told."""
    asked = time.time()
    told = saved.owner.get(saved.urls).json()
    url = told["urls"][FILE]
    assert url.startswith(
        f"{gateway.url}/api/v1/downloads/{saved.tenant.namespace}/{saved.run}/external_weights/out/{KEY}/{FILE}?"
    )
    assert asked + 1800 < int(httpx.URL(url).params["expires"]) <= asked + 7200
    whole = get(url)
    assert (whole.status_code, whole.content == CONTENT) == (200, True)
    assert whole.headers["cache-control"] == "private, no-store"
    assert whole.headers["transfer-encoding"] == "chunked"
    part = get(url, Range="bytes=5-9")
    assert (part.status_code, part.content) == (206, CONTENT[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(CONTENT)}"
    tail = get(url, Range="bytes=-7", **{"If-Range": whole.headers["etag"]})
    assert (tail.status_code, tail.content) == (206, CONTENT[-7:])
    assert get(url, Range="bytes=5-9", **{"If-Range": '"another"'}).content == CONTENT
    assert get(url, Range="bytes=1-2,5-9").content == CONTENT
    assert get(url, Range=f"bytes={len(CONTENT)}-").status_code == 416
    head = httpx.head(url, trust_env=False)
    assert (head.status_code, head.headers["etag"], head.content) == (200, whole.headers["etag"], b"")


def test_a_url_is_for_the_address_that_the_client_uses(saved: Saved) -> None:
    """Also behind a proxy that ends TLS; a Host that is none is refused."""
    for headers, base in (
        ({"Host": "models.example:8443", "X-Forwarded-Proto": "https"}, "https://models.example:8443/api/v1/"),
        ({"Host": "models.example", "X-Forwarded-Proto": "file"}, "http://models.example/api/v1/"),
    ):
        assert saved.owner.get(saved.urls, headers=headers).json()["urls"][FILE].startswith(base)
    assert saved.owner.get(saved.urls, headers={"Host": "x/y?"}).status_code == 400


def test_a_url_opens_nothing_else_and_not_for_long(saved: Saved, cluster: Cluster) -> None:
    """Any change of it is refused before a pod is asked, and so is one whose time is over."""
    url, other, before = saved.url(), cluster.tenant(), saved.asked()
    mac = httpx.URL(url).params["mac"]
    expires = int(httpx.URL(url).params["expires"])
    changed = [
        url.replace(mac, mac[::-1]),
        url.replace(mac, ""),
        url.replace(f"mac={mac}", "mac=%ff%00"),
        url.replace(str(expires), str(expires + 1)),
        url.replace(f"expires={expires}", "expires="),
        url.replace(f"expires={expires}", "expires=%D9%A1"),
        url.replace(saved.tenant.namespace, other.namespace),
        url.replace(saved.run, saved.run[:-1] + "1"),
        url.replace("/external_weights/", "/weights/"),
        url.replace("/out/", "/in/"),
        url.replace(f"/{KEY}/", "/1-5/"),
        url.replace(FILE, "README.md"),
        url.partition("?")[0],
    ]
    for each in changed:
        assert each != url
        answer = get(each)
        assert (answer.status_code, answer.json()) == (403, {"detail": "mac: this URL was not given out here"}), each
    past = int(time.time())
    path = f"{saved.run}/external_weights/out/{KEY}/{FILE}"
    old = tokens.download_mac(bytes.fromhex(MASTER), saved.tenant.namespace, past, path)
    answer = get(url.replace(mac, old).replace(str(expires), str(past)))
    assert answer.status_code == 403
    assert answer.json()["detail"].startswith("expires: ")
    assert saved.asked() == before
    assert get(url).content == CONTENT


def test_what_was_replaced_under_its_name_is_not_there_any_more(saved: Saved) -> None:
    """A URL names what was stored when it was given out; the pod says that this is gone."""
    expires, path = int(time.time()) + 60, f"{saved.run}/external_weights/out/1-3/{FILE}"
    mac = tokens.download_mac(bytes.fromhex(MASTER), saved.tenant.namespace, expires, path)
    url = saved.url().partition("?")[0].replace(f"/{KEY}/", "/1-3/")
    answer = get(f"{url}?expires={expires}&mac={mac}")
    assert (answer.status_code, answer.json()) == (404, {"detail": "file"})


def test_urls_are_for_owners_and_who_may_read_what_they_published(
    saved: Saved, cluster: Cluster, gateway: GatewayProcess
) -> None:
    """Another key of the namespace is told them from then on, one of another namespace never."""
    stranger = cluster.tenant()
    keys = cluster.key(saved.tenant.namespace), cluster.key(stranger.namespace)
    with gateway.session(keys[0]) as (reader, _), gateway.session(keys[1]) as (outsider, _):
        assert {one.get(saved.urls).status_code for one in (reader, outsider)} == {403}
        publication = f"/training_runs/{saved.run}/checkpoints/external_weights/out/publish"
        assert saved.owner.post(publication).status_code == 200
        assert get(reader.get(saved.urls).json()["urls"][FILE]).content == CONTENT
        assert outsider.get(saved.urls).status_code == 403
        for tail in ("weights/out", "external_weights/..", "external_weights/a%2fb"):
            answer = saved.owner.get(f"/training_runs/{saved.run}/checkpoints/{tail}/external_weights_urls")
            assert answer.status_code == 404, tail


def test_a_download_outlives_its_pod(mortal: Saved, processes: Processes, address: Address) -> None:
    """Python's urllib reads on as if nothing had happened; the next pod is asked for what is missing, and no more."""
    got = list[bytes]()

    def fetch(url: str) -> None:
        with urllib.request.urlopen(url, timeout=30) as response:
            while part := response.read(8192):
                got.append(part)

    url = mortal.url()
    mortal.pod.mode("hold")
    reading = threading.Thread(target=fetch, args=(url,))
    reading.start()
    wait_for("something of the file", lambda: sum(map(len, got)) > 100_000)
    mortal.pod.kill()
    mortal.tenant.recovering("its node is gone")
    pod = mortal.tenant.start_pod(processes, address())
    mortal.tenant.serve(pod)
    reading.join(30)
    assert b"".join(got) == CONTENT
    first, second = mortal.asked()
    assert (first["pod"], first["range"], second["pod"]) == (mortal.pod.uid, None, pod.uid)
    assert second["range"] == f"bytes={len(CONTENT) // 2}-{len(CONTENT) - 1}"


def test_a_download_waits_for_a_pod(mortal: Saved, processes: Processes, address: Address) -> None:
    """Before its first byte, too; whichever replica has given out the URL."""
    url, got = mortal.url(), list[bytes]()
    mortal.pod.kill()
    mortal.tenant.recovering("its node is gone")
    reading = threading.Thread(target=lambda: got.append(get(url, Range="bytes=100-199").content))
    reading.start()
    mortal.tenant.serve(mortal.tenant.start_pod(processes, address()))
    reading.join(30)
    assert got == [CONTENT[100:200]]


def test_a_checkpoint_of_another_kind_is_one_archive(saved: Saved) -> None:
    """As older SDKs ask for it; external weights are none."""
    one = f"/training_runs/{saved.run}/checkpoints"
    told = saved.owner.get(f"{one}/weights/saved/archive").json()
    assert told.keys() == {"url", "expires"}
    assert get(told["url"]).content == CONTENT
    assert get(told["url"].replace("/weights/", "/sampler_weights/")).status_code == 403
    for none in ("external_weights/out", "snapshots/out"):
        assert saved.owner.get(f"{one}/{none}/archive").status_code == 404, none
