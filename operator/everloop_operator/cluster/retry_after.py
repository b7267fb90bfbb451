"""How long a server asks its clients to wait: RFC 9110, section 10.2.3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime

UNSAID_SECONDS = 1.0
LONGEST_SECONDS = 10.0


def wait_seconds(headers: Mapping[str, str]) -> float:
    """Seconds to wait after an answer with these headers, at most LONGEST_SECONDS.

    `Retry-After` is a number of seconds, or a date; that counts from the `Date` of the answer, because clocks differ.
    UNSAID_SECONDS where it is missing or can't be read.
    """
    asked = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", asked):  # the RFC has no fractions; some proxies do
        return min(float(asked), LONGEST_SECONDS)
    try:
        wait = parsedate_to_datetime(asked) - parsedate_to_datetime(headers.get("Date", ""))
    except (ValueError, TypeError):  # TypeError: only one of the two names its zone
        return UNSAID_SECONDS
    return min(max(wait / timedelta(seconds=1), 0.0), LONGEST_SECONDS)
