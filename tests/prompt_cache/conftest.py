"""A store to look prompts up in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv_rag.store import KVStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store") as opened:
        yield opened
