"""Names of children: whatever admission lets through as a name, they are names too, and no two are one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from everloop_operator.api import names
from everloop_operator.api.training_session import MAX_NAME_LENGTH
from everloop_operator.core import children, volumes
from everloop_operator.core.jobs import children as job_children
from tests.operator.builders import session, spec

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label: the strictest of what Kubernetes asks of a pod's name, which is its host's name too."""
ALIKE = "x" * (MAX_NAME_LENGTH - 1)
NAMES = ("1", "a", "a-a1", "a-a1-0", "a-a1-token", "a-driver", "a-driver-a1", "a-journal", f"{ALIKE}1", f"{ALIKE}2")
ATTEMPTS = (1, 11, 999_999_999)


def pods(name: str, attempt: int) -> list[str]:
    return [children.pod_name(name, attempt), job_children.pod_name(name, attempt)]


def secrets(name: str, attempt: int) -> list[str]:
    return [children.secret_name(name, attempt), job_children.secret_name(name, attempt)]


def test_children_of_any_name_have_names() -> None:
    """Also of the longest, of one that begins with a digit, and after very many attempts."""
    for name, attempt in itertools.product(NAMES, ATTEMPTS):
        found = [*pods(name, attempt), *secrets(name, attempt), spec().storage.journal.claim_name(name)]
        assert [child for child in found if LABEL.fullmatch(child) is None] == []


def test_no_two_children_have_one_name() -> None:
    """However the names of their owners resemble each other, or those of other children."""
    for kind in (pods, secrets):
        found = [child for name, attempt in itertools.product(NAMES, ATTEMPTS) for child in kind(name, attempt)]
        assert len(set(found)) == len(found)


def test_a_pod_is_reached_by_what_it_was_told() -> None:
    """There is one way from names to paths: what the trainer is told to use is what is mounted."""
    for name in NAMES:
        own = replace(session(), name=name)
        body = children.pod(own, spec(), 7, image="trainer:1", avoid=(), shun=())
        assert body["metadata"]["labels"][names.LABEL_SESSION] == name
        [token] = [volume for volume in body["spec"]["volumes"] if volume["name"] == "token"]
        assert token["secret"]["secretName"] == children.token_secret(own, 7, "t")["metadata"]["name"]
        root = children.trainer_config(own, spec(), 7)["storage"]["root"]
        assert root.startswith(f"{volumes.JOURNAL_MOUNT}/{own.namespace}/{name}")
