"""An RLJob on the local cluster: the example of the repository, what can be killed of it, and what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from demo import adapters, install
from demo.faults import processes
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop
from tests.prepared import client_python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own-loop"
TEXT = EXAMPLE.parent / "sonnets.txt"
SECONDS = 240.0
"""For one step of a story; two cores are shared by everything."""

Body = dict[str, Any]


class Job:
    """One RLJob of the example's."""

    def __init__(self, everloop: Everloop, name: str, arguments: tuple[str, ...]) -> None:
        self.everloop = everloop
        self.name = name
        self.arguments = arguments
        self._tools = everloop.session.tools
        # An image that the local cluster does not know is the bare machine. Its pods see neither /tmp nor the cluster's
        # own files there, and read as uid 1000.
        self.program = Path(tempfile.mkdtemp(prefix="everloop-own-loop-", dir="/var/tmp"))
        self.program.chmod(0o755)
        for source in (EXAMPLE / "loop.py", TEXT):
            shutil.copyfile(source, self.program / source.name)

    def create(self, **changes: Any) -> None:
        """The example's manifest, with a program that is there."""
        body = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())
        body["metadata"]["name"] = self.name
        command = [client_python(), str(self.program / "loop.py")]
        runner = {**body["spec"]["runner"], "command": command, "args": list(self.arguments)}
        spec = {**body["spec"], "runner": runner, **changes}
        body["spec"] = {field: value for field, value in spec.items() if value is not None}
        self._tools.kube("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(body))

    def patch(self, spec: Body) -> None:
        """A person changes its spec."""
        change = json.dumps({"spec": spec})
        self._tools.kube("-n", NAMESPACE, "patch", "rlj", self.name, "--type=merge", "-p", change)

    def delete(self) -> None:
        """A person deletes it."""
        self._tools.kube("-n", NAMESPACE, "delete", "rlj", self.name)
        shutil.rmtree(self.program)

    def status(self) -> Body:
        """What the operator says of it, {} while the API server is away or there is nothing."""
        try:
            found: Body = self._tools.get("-n", NAMESPACE, "rlj", self.name).get("status", {})
        except RuntimeError:
            return {}
        return found

    def pods(self) -> list[Body]:
        """Its driver pods."""
        found: list[Body] = self._tools.get("-n", NAMESPACE, "pods", "-l", f"everloop.dev/job={self.name}")["items"]
        return found

    def wait(self, what: str, fact: Callable[[Body], bool]) -> Body:
        """The status once it is so."""
        seen: Body = {}

        def probe() -> Body | None:
            nonlocal seen
            seen = self.status()
            return seen if seen and fact(seen) else None

        try:
            return eventually(probe, what, SECONDS, pause=0.3)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {json.dumps(seen)[:3000]}") from None

    def wait_reported(self, number: int) -> None:
        """Until so many iterations are reported; the status tells of them some seconds later."""
        try:
            eventually(lambda: self.reported() >= number, f"iteration {number}", SECONDS, pause=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {json.dumps(self.status())[:3000]}") from None

    def reported(self) -> int:
        """The last iteration that its driver has reported."""
        lines = self.lines()
        return int(lines[-1]["iteration"]) if lines else 0

    def wait_elsewhere(self, lost: str) -> None:
        """Until a driver of it is on another node than this."""
        self.wait("another node", lambda status: (status.get("pod") or {}).get("node", "") not in ("", lost))

    # --- faults ---

    def kill_driver(self) -> None:
        """SIGKILL to the program. Raises LookupError if it does not run."""
        pod = self.status().get("pod") or {}
        pids = self.everloop.session.pids(pod["name"]) if pod else []
        found = [process for process in processes(pids) if "loop.py" in process.command]
        if not found:
            raise LookupError("no driver runs")
        os.kill(found[0].pid, signal.SIGKILL)

    def node(self) -> str:
        """Where its driver is."""
        return str(self.wait("a node", lambda status: bool((status.get("pod") or {}).get("node")))["pod"]["node"])

    # --- what it leaves ---

    @property
    def directory(self) -> Path:
        """Its directory on the shared volume."""
        uid = self._tools.get("-n", NAMESPACE, "rlj", self.name)["metadata"]["uid"]
        return self.everloop.session.cluster.shared / "training" / NAMESPACE / "_jobs" / f"{self.name}-{uid}"

    def lines(self) -> list[Body]:
        """The reports that count, by the rule of docs/rljob.md, told independently of the reader's code."""
        records = {}
        for path in self.directory.glob("a*.json"):
            record = json.loads(path.read_text())
            records[record["attempt"]] = record
        number, chain = max(records, default=0), list[tuple[int, int | None, int]]()
        if not number:
            return []
        limit: int | None = None
        while True:
            record = records[number]
            chain.append((number, limit, record["iteration"]))
            if record["predecessor"] is None:
                break
            limit, number = record["predecessor"]["progress"], record["predecessor"]["attempt"]
        counted: list[Body] = []
        for attempt, end, resumed in reversed(chain):
            counted = [line for line in counted if line["iteration"] <= resumed]
            path = self.directory / f"a{attempt}" / "progress.jsonl"
            if path.exists():
                counted += [json.loads(line) for line in path.read_bytes()[:end].split(b"\n")[:-1]]
        return counted

    def adapter(self) -> str:
        """Fingerprint of what its last checkpoint holds."""
        location = self.status()["latestCheckpoint"]["location"]
        return adapters.fingerprint(self.everloop.session.adapter(location))


def reached(status: Body) -> int:
    """The last iteration that a status tells of."""
    return int((status.get("progress") or {}).get("iteration", 0))


def unbroken(everloop: Everloop, program: Path, arguments: tuple[str, ...], seed: int) -> tuple[list[Body], str]:
    """The same program run once without an RLJob: its reports, and the fingerprint of its last checkpoint."""
    with tempfile.TemporaryDirectory(dir=everloop.directory) as state:
        environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "TINKER_BASE_URL": everloop.session.url,
            "TINKER_API_KEY": everloop.session.key,
            "EVERLOOP_STATE_DIR": state,
            "EVERLOOP_SEED": str(seed),
        }
        command = [client_python(), str(program / "loop.py"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in Path(state, "progress.jsonl").read_text().splitlines()]
    return lines, adapters.fingerprint(everloop.session.adapter(lines[-1]["checkpoint"]))


def gone_on_from(everloop: Everloop, location: str) -> str:
    """The model that a person makes from a checkpoint, with a key of the namespace and the unmodified SDK."""
    code = (
        "import os, sys, tinker\n"
        "service = tinker.ServiceClient()\n"
        "training = service.create_training_client_from_state_with_optimizer(sys.argv[1]).result()\n"
        "print(training.get_info().model_id, flush=True)\n"
        "os._exit(0)"
    )
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "TINKER_BASE_URL": everloop.session.url,
        "TINKER_API_KEY": everloop.session.key,
    }
    command = [client_python(), "-c", code, location]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def kill_operator(everloop: Everloop) -> None:
    """SIGKILL to the operator. Raises LookupError if it does not run."""
    tools, cluster = everloop.session.tools, everloop.session.cluster
    selector = "app.kubernetes.io/component=operator"
    [pod, *_] = tools.get("-n", install.RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
    pids = cluster.container_pids(pod["metadata"]["name"], install.RELEASE_NAMESPACE)
    if not pids:
        raise LookupError("no operator runs")
    os.kill(pids[0], signal.SIGKILL)


def kill_session(everloop: Everloop) -> None:
    """Force deletion of the session's pod. Raises LookupError if there is none."""
    pod = everloop.session.status().get("pod")
    if not pod:
        raise LookupError("the session has no pod")
    command = ("delete", "pod", pod["name"], "--grace-period=0", "--force", "--ignore-not-found")
    everloop.session.tools.kube("-n", NAMESPACE, *command)
