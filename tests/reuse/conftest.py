"""Fixtures of the matcher's tests."""

from __future__ import annotations

import pytest

from .shelf import Shelf


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()
