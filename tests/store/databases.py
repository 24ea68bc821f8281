"""The kinds of index database that a test of the store runs on."""

from __future__ import annotations

import pytest

BOTH_IN_SOAK = pytest.mark.parametrize(
    "index_url",
    ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)],
    indirect=True,
)
"""For loops of faults and kills, which take long: on SQLite always, on PostgreSQL in `make soak`."""
