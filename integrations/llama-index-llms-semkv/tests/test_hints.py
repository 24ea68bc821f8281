"""What a retriever finds is hinted to the engine, and found in the prompt all the same."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.semkv import SemKV

from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport

Hint = tuple[tuple[str, ...], str | None]


@pytest.fixture
def given(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Hint]:
    """The hints that reach the engine, which follows them too."""
    hints: list[Hint] = []
    follow = engine.hint

    def hint(texts: Any, *, namespace: str | None = None) -> None:
        hints.append((tuple(texts), namespace))
        follow(texts, namespace=namespace)

    monkeypatch.setattr(engine, "hint", hint)
    gc.collect()  # the models of tests before this one
    return hints


def test_retrieved_nodes_are_hinted_once_to_each_engine_and_namespace(
    engine: Engine, given: list[Hint], namespace: str, embedding: BaseEmbedding
) -> None:
    # Models of other tests may be about still, in other namespaces.
    silent = f"{namespace}-silent"

    def taken() -> list[Hint]:
        taken = [hint for hint in given if hint[1] in (None, namespace, silent)]
        given.clear()
        return sorted(taken, key=str)

    node = TextNode(text="The Mok pis club began in 1988 .", metadata={"club": "Mok pis"})
    retriever = VectorStoreIndex([node], embed_model=embedding).as_retriever()
    models = [SemKV(engine=engine), SemKV(engine=engine)]
    models += [SemKV(engine=engine, namespace=namespace) for _ in range(2)]
    models += [SemKV(engine=engine, namespace=silent, hints=False)]
    retriever.retrieve("Mok pis")
    # None of these was asked anything yet: there may be no engine to tell.
    assert namespace not in [hint[1] for hint in taken()]
    for llm in models:
        assert llm.metadata
    retriever.retrieve("Mok pis")
    text = node.get_content(MetadataMode.LLM)
    assert taken() == [((text,), namespace), ((text,), None)]
    del llm
    models.clear()
    gc.collect()
    retriever.retrieve("Mok pis")
    assert namespace not in [hint[1] for hint in taken()]


async def test_hints_of_interleaved_queries(
    engine: Engine,
    given: list[Hint],
    namespace: str,
    embedding: BaseEmbedding,
    nodes: list[TextNode],
) -> None:
    llm = SemKV(engine=engine, namespace=namespace)
    assert llm.metadata
    index = VectorStoreIndex(nodes, embed_model=embedding)
    retriever = index.as_retriever(similarity_top_k=1)
    wanted = [node.text for node in nodes[:24]]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: retriever.retrieve(text)[0].node.text, wanted))
    found += [(await retriever.aretrieve(text))[0].node.text for text in wanted]
    own = [texts for texts, where in given if where == namespace]
    assert sorted(own) == sorted((text,) for text in found)


def test_a_failing_hint_fails_no_retrieval(
    engine: Engine, embedding: BaseEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(texts: Any, *, namespace: str | None = None) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(engine, "hint", fail)
    llm = SemKV(engine=engine)
    assert llm.metadata
    retriever = VectorStoreIndex([TextNode(text="a")], embed_model=embedding).as_retriever()
    assert len(retriever.retrieve("a")) == 1


def test_what_was_retrieved_and_not_stored_is_stored_for_the_next_time(
    tools: Engine, namespace: str, embedding: BaseEmbedding
) -> None:
    llm = SemKV(engine=tools, namespace=namespace, max_tokens=4)
    text = (
        "the store keeps the keys and values of each chunk layer by layer in one file and a "
        "question about the colour of the car is answered from documents that were found for it"
    )
    index = VectorStoreIndex([TextNode(text=text)], embed_model=embedding)
    query_engine = index.as_query_engine(llm=llm)

    def report() -> ReuseReport:
        tools.reset_prefix_cache()
        response = llm.complete(f"who owns\n{text}", formatted=True)
        return ReuseReport.from_mapping(response.additional_kwargs["semkv"])

    assert report().kv_cache == "miss"
    query_engine.query("where are the values?")
    assert tools.store is not None
    until = time.monotonic() + 60
    while not list(tools.store.chunks(tools.fingerprint, namespace)):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert report().reused_tokens >= 0.95 * llm.count_tokens(text)
