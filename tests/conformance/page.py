"""The page of what each SDK's calls became."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ABSENT = "-"
HEAD = """\
# Conformance

What becomes of each thing that the `tinker` SDK offers its users: methods, arguments, losses, parameters, commands.
Two versions of the SDK, unmodified, each in an environment of its own, call a gateway and a session pod.
`make conformance` writes this page; a test compares it.

* **served**: the call was made and its effect seen through another call, as the last column says.
* **refused**: the call ended with this message, for this reason.
* **untested**: nobody has looked.
* -: this version does not have it.

An asynchronous twin of a method sends what the method sends; one of each class is called.
"""


@dataclass(frozen=True)
class Told:
    """What one version of the SDK said of one row."""

    version: str
    section: str
    row: str
    state: str
    seen: str = ""
    message: str = ""
    reason: str | None = None


def render(told: Sequence[Told]) -> str:
    """The page, newest version first."""
    versions = sorted({each.version for each in told}, key=_numbers, reverse=True)
    by_row = {(each.version, each.row): each for each in told}
    lines = [HEAD]
    counts = Counter((each.version, each.state) for each in told)
    lines.append("| version | served | refused | untested |\n|---|---|---|---|")
    for version in versions:
        cells = (str(counts[version, state]) for state in ("served", "refused", "untested"))
        lines.append(f"| {version} | {' | '.join(cells)} |")
    for section in dict.fromkeys(each.section for each in told):
        lines += [f"\n## {section}\n", f"| | {' | '.join(versions)} | |", "|---" * (len(versions) + 2) + "|"]
        for row in dict.fromkeys(each.row for each in told if each.section == section):
            found = [by_row.get((version, row)) for version in versions]
            states = " | ".join(each.state if each else ABSENT for each in found)
            lines.append(f"| `{row}` | {states} | {_cell(' '.join(_words([each for each in found if each])))} |")
    return "\n".join(lines) + "\n"


def _words(found: Sequence[Told]) -> Iterator[str]:
    """What was seen, and each message with the versions that gave it where not all did."""
    yield from dict.fromkeys(each.seen for each in found if each.state == "served")
    messages = dict.fromkeys(each.message for each in found if each.state == "refused")
    for message in messages:
        givers = [each.version for each in found if each.message == message]
        yield f"`{message}`" + (f" ({', '.join(givers)})" if len(givers) < len(found) else "")
    yield from dict.fromkeys(each.reason for each in found if each.state == "refused" and each.reason)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
