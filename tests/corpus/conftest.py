"""A store, an engine that makes its KV up, and a folder of documents."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import MadeUpEngine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def engine(store: KVStore) -> MadeUpEngine:
    return MadeUpEngine(store)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Two documents of three sentences of eight tokens each; their middle sentence is the same."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text(f"{sentence(1)} {sentence(0)} {sentence(2)}")
    (folder / "b.txt").write_text(f"{sentence(3)} {sentence(0)} {sentence(4)}")
    return folder


def sentence(number: int) -> str:
    """Seven words and a full stop, which no other number's sentence has."""
    return " ".join(f"w{number * 7 + n}" for n in range(7)) + " ."
