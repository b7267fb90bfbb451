"""What the loop needs of the world, in its own words; `cluster` implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from everloop_operator.api import names
from everloop_operator.core.events import Event

Body = Mapping[str, Any]
Now = Callable[[], datetime]
"""The clock: an aware time."""


class Key(NamedTuple):
    """A TrainingSession, or an object of another kind of ours."""

    namespace: str
    name: str
    kind: str = names.TRAINING_SESSION_KIND


def job_key(namespace: str, name: str) -> Key:
    """The key of an RLJob."""
    return Key(namespace, name, names.RL_JOB_KIND)


#   ClusterError
#    +- Refused    the API server will not have this object (400, 422); repeating it unchanged is pointless
#    |   +- Forbidden   for this user, or by admission (403)
#    +- Conflict   somebody wrote in between (409); observe again
#    +- Absent     there is no such object (404)


class ClusterError(Exception):
    """A request to the API server failed; the message says which, and never holds a body."""


class Refused(ClusterError):
    """The API server will not have this object. The message is in its words."""


class Forbidden(Refused):
    """Authorization or admission will not have it."""


class Conflict(ClusterError):
    """The object is another one than was read."""


class Absent(ClusterError):
    """There is no such object."""


class Unanswered(Exception):
    """A server in a pod gave no usable answer; the message says why, for people."""


class Silent(Unanswered):
    """It gave none at all in time; that may be the fault of this process."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A list or a page of one, and the version of the cluster's state that it shows."""

    items: tuple[Body, ...]
    version: int


class Cluster(Protocol):
    """The API server. Every method raises ClusterError when a request fails otherwise than it says."""

    def list_sessions(self) -> AsyncIterator[Listed]:
        """All TrainingSessions, page by page."""
        ...

    def list_jobs(self) -> AsyncIterator[Listed]:
        """All RLJobs, page by page."""
        ...

    def list_pods(self) -> AsyncIterator[Listed]:
        """All session pods and driver pods, page by page."""
        ...

    async def list_job_keys(self) -> Listed:
        """Metadata of the API keys of all jobs."""
        ...

    def list_nodes(self) -> AsyncIterator[Listed]:
        """All nodes, page by page."""
        ...

    async def latest(self, body: Body) -> Body:
        """A TrainingSession or an RLJob that was read before, read now. Raises Absent."""
        ...

    async def pod(self, namespace: str, name: str) -> Body:
        """A pod, read now. Raises Absent."""
        ...

    async def node(self, name: str) -> Body:
        """A node, read now. Raises Absent."""
        ...

    async def claim(self, namespace: str, name: str) -> Body:
        """A PersistentVolumeClaim, read now. Raises Absent."""
        ...

    async def volume(self, name: str) -> Body:
        """A PersistentVolume, read now. Raises Absent, and Refused where the operator may not read volumes."""
        ...

    async def events_of(self, namespace: str, kind: str, name: str) -> Listed:
        """The events of one object."""
        ...

    async def create_claim(self, body: Body) -> None:
        """Creates a PersistentVolumeClaim; that there is one of its name already is no error. Raises Refused."""
        ...

    async def apply(self, body: Body) -> Body:
        """Makes the object, or makes it what it should be; returns it as it is now.

        Raises:
            Refused: also where there is a Pod, Secret or PodDisruptionBudget of this name that has another owner.
        """
        ...

    async def delete_pod(self, namespace: str, name: str, *, uid: str, force: bool) -> None:
        """Deletes the pod of this UID; that it is gone or another one already is no error.

        Raises:
            Conflict: somebody wrote in between, and it is there still.
        """
        ...

    async def delete_secret(self, namespace: str, name: str) -> None:
        """Deletes a secret; that there is none is no error."""
        ...

    async def delete_owned_secret(self, namespace: str, name: str, *, owner: str) -> None:
        """Deletes a secret if this is its owner's UID; that there is none, or one of somebody else's, is no error."""
        ...

    async def delete_session(self, namespace: str, name: str, *, uid: str) -> None:
        """Deletes the TrainingSession of this UID; that it is gone or another one already is no error.

        Raises:
            Conflict: somebody wrote in between, and it is there still.
        """
        ...

    async def set_finalizers(self, body: Body, finalizers: Sequence[str]) -> Body:
        """Replaces the finalizers of an object as read; returns it as it is now. Raises Conflict, Absent."""
        ...

    async def write_status(self, body: Body, status: Body) -> Body:
        """Replaces the status of an object as read. Raises Conflict, Absent."""
        ...

    async def post_event(self, body: Body, event: Event, time: datetime) -> None:
        """Tells an event of an object; once per reason and key of the event."""
        ...
