"""The session's engine and server, with `examples/corpus` in their stores, and what applications need."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import TextNode
from llama_index.llms.semkv import SemKV

from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport
from semkv_rag.store import KVStore
from workbench.engines import Engines
from workbench.server import Server
from workbench.settings import ROOT

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
def tools(engines: Engines, tiny_model: Callable[[str], Path]) -> Engine:
    """A tiny random model with a tool parser, which stores what is retrieved and not stored."""
    return engines.get(
        tiny_model("qwen3"),
        chat_args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


@pytest.fixture(scope="session")
def prompt() -> str:
    """Three documents of the corpus and a question whose answer is in the last."""
    names = ("mok-pis", "som-mel", "zur-stul")
    texts = [(CORPUS / "schools" / f"{name}.txt").read_text() for name in names]
    return "\n".join(texts) + "Question : who leads Zur stul ? Answer :"


@pytest.fixture(scope="session")
def answer() -> str:
    return "Ivan"


class WordEmbedding(BaseEmbedding):
    """Counts of a text's words: enough to find the paragraph that a question's words stand in."""

    def _get_text_embedding(self, text: str) -> list[float]:
        counts = [0.001] * 512
        for word in re.findall(r"\w+", text.lower()):
            counts[zlib.crc32(word.encode()) % len(counts)] += 1.0
        return counts

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture(scope="session")
def embedding() -> BaseEmbedding:
    return WordEmbedding()


@pytest.fixture(scope="session")
def nodes() -> list[TextNode]:
    """The corpus's paragraphs, which are its stored chunks."""
    return [
        TextNode(text=paragraph, id_=f"{file.parent.name}/{file.stem}/{number}")
        for file in sorted(CORPUS.glob("*/*.txt"))
        for number, paragraph in enumerate(file.read_text().strip().split("\n\n"))
    ]


@pytest.fixture(scope="session")
def index(nodes: list[TextNode], embedding: BaseEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex(nodes, embed_model=embedding)


@pytest.fixture
def settings(engine: Engine) -> Iterator[None]:
    """LlamaIndex's settings as docs/llama-index.md has them: it counts in the model's tokens."""
    Settings.llm = llm = SemKV(engine=engine)
    Settings.tokenizer = llm.tokens
    yield
    Settings._llm = None
    Settings.tokenizer = None  # type: ignore[assignment]  # the default again


class Reports(BaseEventHandler):
    """Collects the reports of the model's calls."""

    taken: list[ReuseReport] = []  # noqa: RUF012 (a pydantic field)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            assert event.response is not None
            if report := event.response.additional_kwargs.get("semkv"):
                self.taken.append(ReuseReport.from_mapping(report))


@pytest.fixture
def reports() -> Iterator[Callable[[], list[ReuseReport]]]:
    """Gives the reports since it was last called."""
    handler = Reports()

    def take() -> list[ReuseReport]:
        taken = list(handler.taken)
        handler.taken.clear()
        return taken

    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield take
    dispatcher.event_handlers.remove(handler)
