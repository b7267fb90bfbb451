"""Whether all is to be run that `make acceptance` runs, or what `make test` has time for."""

from __future__ import annotations

import os

import pytest

WHOLE = "EVERLOOP_TEST_WHOLE" in os.environ
only_whole = pytest.mark.skipif(not WHOLE, reason="one of those that make acceptance runs")
