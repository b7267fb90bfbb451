"""``python -m everloop_gateway`` serves; ``python -m everloop_gateway mint-key ...`` makes an API key."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from everloop_gateway import logs, mint, settings
from everloop_gateway.serve import serve


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m everloop_gateway", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    mint.add_arguments(commands.add_parser("mint-key", help="make an API key and the Secret that stands for it"))
    arguments = parser.parse_args()
    if arguments.command == "mint-key":
        return mint.run(arguments)
    try:
        found = settings.from_environment(os.environ)
    except settings.InvalidSettings as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(found.log_level)
    asyncio.run(serve(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
