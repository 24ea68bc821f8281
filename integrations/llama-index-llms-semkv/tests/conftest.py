"""The session's engine and server, with the demo's corpus in their stores."""

from __future__ import annotations

import shutil

import pytest

from conftest import ROOT
from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from semkv_rag.store import KVStore
from tests.engine.server import Server

CORPUS = ROOT / "examples" / "corpus"


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
def prompt() -> str:
    """Three documents of the corpus and a question whose answer is in the last."""
    names = ("mok-pis", "som-mel", "zur-stul")
    texts = [(CORPUS / "schools" / f"{name}.txt").read_text() for name in names]
    return "\n".join(texts) + "Question : who leads Zur stul ? Answer :"


@pytest.fixture(scope="session")
def answer() -> str:
    return "Ivan"
