"""`python -m everloop_trainer.engine`: run a spare by hand. In a pod the supervisor starts it, configured."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.spare import run_spare


def main() -> int:
    """Parse the command line and run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m everloop_trainer.engine", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-rank", type=int, default=128)
    parser.add_argument("--max-sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--max-image-bytes", type=int, default=8 << 20)
    parser.add_argument("--max-image-pixels", type=int, default=1 << 24)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    return run_spare(SpareConfig(**vars(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
