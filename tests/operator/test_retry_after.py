"""How long the operator waits for an API server that has too much to do."""

from __future__ import annotations

import pytest

from everloop_operator.cluster.retry_after import LONGEST_SECONDS, UNSAID_SECONDS, wait_seconds

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, UNSAID_SECONDS),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": " 3 "}, 3.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "86400"}, LONGEST_SECONDS),
        ({"Retry-After": "9" * 400}, LONGEST_SECONDS),
        ({"Retry-After": "Sun, 06 Nov 1994 08:49:41 GMT", "Date": DATE}, 4.0),
        ({"Retry-After": "Sunday, 06-Nov-94 08:49:41 GMT", "Date": DATE}, 4.0),
        ({"Retry-After": "Sun Nov  6 08:49:41 1994", "Date": "Sun Nov  6 08:49:37 1994"}, 4.0),
        ({"Retry-After": "Mon, 07 Nov 1994 08:49:37 GMT", "Date": DATE}, LONGEST_SECONDS),
        ({"Retry-After": "Sat, 05 Nov 1994 08:49:37 GMT", "Date": DATE}, 0.0),
        ({"Retry-After": DATE}, UNSAID_SECONDS),
        ({"Retry-After": DATE, "Date": "Sun Nov  6 08:49:37 1994"}, UNSAID_SECONDS),
        ({"Retry-After": "nan"}, UNSAID_SECONDS),
        ({"Retry-After": "inf"}, UNSAID_SECONDS),
        ({"Retry-After": "-1"}, UNSAID_SECONDS),
        ({"Retry-After": "later", "Date": DATE}, UNSAID_SECONDS),
        ({"Retry-After": "٣"}, UNSAID_SECONDS),
    ],
)
def test_wait_is_what_the_server_asks_for_within_bounds(headers: dict[str, str], seconds: float) -> None:
    """Seconds and dates of every form are understood; what can't be read is no defect."""
    assert wait_seconds(headers) == seconds
