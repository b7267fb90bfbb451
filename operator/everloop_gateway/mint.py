"""``mint-key``: a new API key, made without any rights in the cluster."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta

from everloop_gateway import keys

_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--namespace", required=True, type=_dns_label, help="the tenant's namespace")
    parser.add_argument("--subject", required=True, help="whose key it is, as shown in logs")
    parser.add_argument("--release-namespace", default="everloop-system", type=_dns_label, help="where the Secret goes")
    parser.add_argument("--days", type=_days, help="days until it expires; without this it does not")


def run(arguments: argparse.Namespace) -> int:
    """Print the Secret's manifest on standard output, and the key, which is stored nowhere, on standard error."""
    expires = None if arguments.days is None else datetime.now(UTC) + timedelta(days=arguments.days)
    key, manifest = keys.mint(
        arguments.namespace, arguments.subject, arguments.release_namespace, expires, secrets.token_bytes(38)
    )
    print(json.dumps(manifest, indent=2))
    print(key, file=sys.stderr)
    return 0


def _dns_label(text: str) -> str:
    if not _DNS_LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of a namespace")
    return text


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError("between 0 and 36500 days")
    return days
