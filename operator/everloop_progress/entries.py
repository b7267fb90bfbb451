"""One line of a report: of `progress.jsonl` for a finished iteration, of `evaluation.jsonl` for an evaluation.

A line is a JSON object. `iteration` is required; `reward`, `metrics`, `checkpoint`, `done` and `time` may be left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

LARGEST_ITERATION = 1_000_000_000
LARGEST_NUMBER = 1e15
MOST_METRICS = 64
CHECKPOINT = re.compile(r"tinker://[!-.0-~]+/weights/[!-.0-~]+")
METRIC = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,126}[A-Za-z0-9_])?")
LONGEST_CHECKPOINT = 512


class BadLine(ValueError):
    """A line that is no report; the message names the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one line says."""

    iteration: int
    metrics: Mapping[str, float]
    """With the reward, if there is one, under the name `reward`."""
    checkpoint: str = ""
    time: str = ""
    done: bool = False
    """Whether the program has done all that it was to do."""


def parse(line: bytes, *, first: int) -> Entry:
    """What a line says; `first` is the smallest number of an iteration. Raises BadLine."""
    try:
        value = json.loads(line, parse_constant=_no_number)
    except BadLine:
        raise
    except (ValueError, RecursionError):
        raise BadLine("not a JSON object") from None
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    iteration = value.get("iteration")
    if type(iteration) is not int or not first <= iteration <= LARGEST_ITERATION:
        raise BadLine(f"iteration: an integer of at least {first} is required")
    metrics = _metrics(value.get("metrics"))
    if value.get("reward") is not None:
        metrics["reward"] = _number("reward", value["reward"])
    return Entry(
        iteration, metrics, _checkpoint(value.get("checkpoint")), _time(value.get("time")), _done(value.get("done"))
    )


def _no_number(text: str) -> NoReturn:
    raise BadLine(f"{text} is no number")


def _metrics(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MOST_METRICS:
        raise BadLine(f"metrics: an object of at most {MOST_METRICS} numbers is required")
    for name in value:
        if not METRIC.fullmatch(name):
            raise BadLine("metrics: a name consists of at most 128 letters, digits and . / _ -")
    return {name: _number(f"metrics.{name}", number) for name, number in value.items()}


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > LARGEST_NUMBER:
        raise BadLine(f"{field}: a number between -1e15 and 1e15 is required")
    return float(value)


def _checkpoint(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > LONGEST_CHECKPOINT or not CHECKPOINT.fullmatch(value):
        raise BadLine("checkpoint: the path that save_state returned (tinker://.../weights/...) is required")
    return value


def _done(value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return value is True
    raise BadLine("done: true or false is required")


def _time(value: Any) -> str:
    if value is None:
        return ""
    try:
        if datetime.fromisoformat(value).tzinfo is not None and len(value) <= 40:
            return str(value)
    except (TypeError, ValueError):
        pass
    raise BadLine("time: an RFC 3339 time with a zone is required")
