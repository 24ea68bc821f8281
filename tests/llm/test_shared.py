"""Engines are shared by what they are made of, and end by `close_engines`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError
from semkv_rag.llm import LocalBackend, close_engines, shared, shared_engine

PROMPT = "The Mok pis school is led by Kim . Question : who leads Mok pis ? Answer :"
ARGUMENTS = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Nobody else's engine is among the shared ones, and none of these stays."""
    close_engines()
    yield
    close_engines()


def test_threads_share_an_engine_until_it_is_closed(reader: Path, tmp_path: Path) -> None:
    def ask(_: int) -> tuple[str, Engine]:
        engine = shared_engine(str(reader), tmp_path / "store", None, ARGUMENTS)
        return LocalBackend(engine).answer(PROMPT, {"temperature": 0}, {}).text, engine

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(4)))
    assert {text.strip() for text, _ in answers} == {"Kim"}
    (engine,) = {engine for _, engine in answers}
    assert list(shared._engines.values()) == [engine]
    close_engines()
    assert not shared._engines
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPT)
    text, again = ask(0)
    assert text.strip() == "Kim", "started again"
    assert again is not engine
