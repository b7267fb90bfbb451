"""Takes out of a program's output what looks like a secret, before it is shown in a status."""

from __future__ import annotations

import re

HIDDEN = "[hidden]"

_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"tml-[A-Za-z0-9_-]{8,}",
        r"\bhf_[A-Za-z0-9]{8,}",
        r"\bsk-[A-Za-z0-9_-]{8,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
        r"\bgh[pousr]_[A-Za-z0-9]{16,}",
        r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}",
        r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",
        r"""(?i)(?<=[\w-])*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key)["']?\s*[=:]\s*["']?[^\s"',;]{4,}""",
    )
)


def scrub(text: str, longest: int) -> str:
    """The end of a text, at most so many characters, printable, without what looks like a secret."""
    clean = "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)
    for pattern in _PATTERNS:
        clean = pattern.sub(HIDDEN, clean)
    return clean[-longest:]
