"""The local cluster from a shell: ``python -m devcluster --help``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from devcluster import build
from devcluster.cluster import Cluster
from devcluster.settings import ClusterError, Layout
from devcluster.status import describe
from devcluster.supervisor import Supervisor

NODE_ACTIONS = {
    "add": "one more node joins",
    "kill": "switch it off: all its processes end",
    "partition": "its kubelet stops, its containers live on",
    "heal": "bring it back after kill or partition",
    "freeze": "stop all its processes where they are, containers too",
    "thaw": "let a frozen node go on",
    "remove": "switch it off and delete its Node object",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m devcluster", description="A Kubernetes cluster on this machine.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the Kubernetes binary, print its directory")
    commands.add_parser("helm", help="build Helm, print its path")
    commands.add_parser("s3", help="build the tests' S3 server, print its path")
    up = commands.add_parser("up", help="start a cluster")
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument("--gpus", type=int, default=4, help="pretend GPUs of each node")
    up.add_argument("--port", type=int, default=0, help="of the API server; 0 chooses a free one")
    up.add_argument("--images", type=Path, help="JSON list of what image names stand for, see devcluster/README.md")
    down = commands.add_parser("down", help="stop everything, pods included")
    status = commands.add_parser("status", help="show nodes and processes")
    supervise = commands.add_parser("supervise", help="keep the processes of a cluster (started by up)")
    supervise.add_argument("root", type=Path)
    node = commands.add_parser("node", help="change a node or let something happen to it")
    actions = node.add_subparsers(dest="action", required=True)
    roots = [up, down, status]
    for name, text in NODE_ACTIONS.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("name")
        roots.append(action)
        if name == "add":
            action.add_argument("--gpus", type=int, default=4, help="pretend GPUs")
    for command in roots:
        command.add_argument("--root", type=Path, required=True, help="the cluster's directory")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `up` cleans up after both
    try:
        run(arguments)
    except (ClusterError, build.BuildError) as e:
        print(f"devcluster: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("devcluster: interrupted", file=sys.stderr)
        return 130
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Do what the arguments say."""
    if arguments.command == "build":
        print(build.ensure_kube())
        return
    if arguments.command == "helm":
        print(build.ensure_helm())
        return
    if arguments.command == "s3":
        print(build.ensure_s3())
        return
    if arguments.command == "supervise":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Supervisor(Layout(arguments.root)).run()
        return
    cluster = Cluster(arguments.root)
    if arguments.command == "up":
        start = time.monotonic()
        cluster.up(nodes=arguments.nodes, gpus=arguments.gpus, port=arguments.port, images=arguments.images)
        print(f"{len(cluster.settings.nodes)} nodes Ready after {time.monotonic() - start:.1f} s", file=sys.stderr)
        print(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.settings.kube}:$PATH")
    elif arguments.command == "down":
        cluster.down()
    elif arguments.command == "status":
        print(describe(cluster))
    elif arguments.action == "add":
        cluster.node_add(arguments.name, gpus=arguments.gpus)
    else:
        getattr(cluster, f"node_{arguments.action}")(arguments.name)


if __name__ == "__main__":
    sys.exit(main())
