"""An engine and a server as backends, with the same documents stored through each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semkv_rag.engine import Engine
from semkv_rag.llm import Backend, LocalBackend, RemoteBackend
from workbench.server import Server
from workbench.settings import ROOT

SCHOOLS = ROOT / "examples" / "corpus" / "schools"
NAMES = ("mok-pis", "som-mel", "zur-stul")
ANSWER = "Ivan"


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [(SCHOOLS / f"{name}.txt").read_text() for name in NAMES]


@pytest.fixture(scope="session")
def prompt(texts: list[str]) -> str:
    """Three documents and a question whose answer is in the last."""
    return "\n".join(texts) + "Question : who leads Zur stul ? Answer :"


@pytest.fixture(scope="session")
def local(engine: Engine, texts: list[str]) -> Iterator[LocalBackend]:
    backend = LocalBackend(engine)
    backend.store_texts((name, [text]) for name, text in zip(NAMES, texts, strict=True))
    yield backend
    backend.forget(NAMES)


@pytest.fixture(scope="session")
def remote(server: Server, texts: list[str]) -> Iterator[RemoteBackend]:
    backend = RemoteBackend(server.base_url, server.api_key)
    backend.store_texts((name, [text]) for name, text in zip(NAMES, texts, strict=True))
    yield backend
    backend.forget(NAMES)


@pytest.fixture(params=["local", "remote"])
def backend(request: pytest.FixtureRequest, local: LocalBackend, remote: RemoteBackend) -> Backend:
    return local if request.param == "local" else remote
