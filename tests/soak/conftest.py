"""How long the loops run."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def rounds() -> int:
    """How many times as long as usual: `make soak ROUNDS=10` is for a night."""
    return int(os.environ.get("SOAK_ROUNDS", "1"))
