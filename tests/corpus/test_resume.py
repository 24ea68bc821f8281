"""A run that was stopped is gone on with: nothing that was computed is lost or promised wrongly."""

from pathlib import Path

import pytest

from semkv_rag.corpus import precompute
from semkv_rag.store import KVStore
from tests.corpus.conftest import sentence
from tests.corpus.made_up_engine import MadeUpEngine, precompute_until_killed

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
DOCUMENTS, SENTENCES = 10, 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten documents of six sentences, each of which is a chunk of its own."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(DOCUMENTS):
        numbers = range(number * SENTENCES, (number + 1) * SENTENCES)
        (folder / f"{number}.txt").write_text(" ".join(map(sentence, numbers)))
    return folder


@pytest.mark.parametrize("chunks", [0, 1, 31, 33, 59])
def test_killed(folder: Path, tmp_path: Path, chunks: int) -> None:
    precompute_until_killed(tmp_path / "store", folder, chunks)
    with KVStore(tmp_path / "store") as store:
        assert store.verify().ok, "the index promises only what is there"
        engine = MadeUpEngine(store)
        result = precompute(engine, [folder], chunk_tokens=8, context=["prefix"])
        total = DOCUMENTS * SENTENCES
        assert result.chunks_captured == total - chunks, "what was written was taken in"
        assert result.changed + result.unchanged == DOCUMENTS
        assert len(list(store.chunks())) == total
        assert store.verify().ok


def test_stopped_by_ctrl_c(folder: Path, store: KVStore, engine: MadeUpEngine) -> None:
    def interrupt() -> None:
        if len(engine.captured) == 40:
            raise KeyboardInterrupt

    engine.before_write = interrupt
    with pytest.raises(KeyboardInterrupt):
        precompute(engine, [folder], chunk_tokens=8, context=["prefix"])
    assert len(list(store.chunks())) == 40
    whole = len(store.sources())
    assert 0 < whole < DOCUMENTS

    engine.before_write = lambda: None
    result = precompute(engine, [folder], chunk_tokens=8, context=["prefix"])
    assert (result.unchanged, result.changed) == (whole, DOCUMENTS - whole)
    assert result.chunks_captured == DOCUMENTS * SENTENCES - 40


def test_a_torn_file_is_computed_again(folder: Path, store: KVStore, engine: MadeUpEngine) -> None:
    def interrupt() -> None:
        if len(engine.captured) == 3:
            raise SystemExit

    engine.before_write = interrupt
    with pytest.raises(SystemExit):
        precompute(engine, [folder], chunk_tokens=8, context=["prefix"])
    torn = engine.captured[0]
    path = store.path(engine.fingerprint, "default", torn.id)
    store.remove(engine.fingerprint, "default", [torn.id])
    path.write_bytes(b"torn")

    engine.captured.clear()
    engine.before_write = lambda: None
    precompute(engine, [folder], chunk_tokens=8, context=["prefix"])
    assert torn.id in {item.id for item in engine.captured}
    assert store.verify().ok
