"""`python -m everloop_trainer supervisor|server|spare|copies NUMBER|restore|fetch|journal ROOT|merge OPTIONS`.

Each role imports only what it needs: the supervisor nothing but the standard library, the server no torch.
"""

from __future__ import annotations

import sys

USAGE = (
    "usage: python -m everloop_trainer "
    "supervisor | server | spare | copies NUMBER | restore | fetch | journal ROOT | merge OPTIONS"
)


def main(arguments: list[str]) -> int:
    """Runs one role and returns its exit code."""
    match arguments:
        case ["supervisor"]:
            from everloop_trainer import supervisor

            return supervisor.main()
        case ["server"]:
            from everloop_trainer import wiring

            return wiring.run_server()
        case ["spare"]:
            from everloop_trainer import spare

            return spare.main()
        case ["copies", number] if number.isdecimal():
            from everloop_trainer.copies import process

            return process.run_copier(int(number))
        case ["restore"]:
            from everloop_trainer.copies import process

            return process.run_restore()
        case ["fetch"]:
            from everloop_trainer.fetching import process as fetching

            return fetching.run_fetch()
        case ["journal", root]:
            from everloop_trainer import wiring

            return wiring.print_journal(root)
        case ["merge", *options]:
            from everloop_trainer import merging

            return merging.main(options)
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
