"""The session's engine and server with `examples/corpus` in their stores; a model that calls tools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_semkv import close_engines

from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from semkv_rag.store import KVStore
from workbench.server import Server
from workbench.settings import ENGINE_ARGS, ROOT

CORPUS = ROOT / "examples" / "corpus"
TAUGHT = Path(__file__).with_name("taught")


@pytest.fixture(scope="session")
def engine(engine: Engine) -> Engine:
    assert precompute(engine, [CORPUS], chunk_tokens=32).failures == []
    return engine


@pytest.fixture(scope="session")
def server(engine: Engine, server: Server) -> Server:
    """The server gets the engine's chunk files; its index is made again out of them."""
    assert engine.store is not None
    shutil.copytree(engine.store.root / "chunks", server.store / "chunks", dirs_exist_ok=True)
    with KVStore(server.store) as store:
        assert store.rebuild_index().ok
    return server


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The options of a model that calls tools: its engine starts at first use, and is shared."""
    yield {
        "model": str(TAUGHT),
        "store": str(tmp_path_factory.mktemp("taught")),
        "engine_args": dict(ENGINE_ARGS),
        "chat_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    }
    close_engines()


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Three documents of the corpus; the answer to `question` is in the last."""
    names = ("mok-pis", "som-mel", "zur-stul")
    return [(CORPUS / "schools" / f"{name}.txt").read_text() for name in names]


@pytest.fixture(scope="session")
def question() -> str:
    return "who leads Zur stul ?"


@pytest.fixture(scope="session")
def answer() -> str:
    return "Ivan"
