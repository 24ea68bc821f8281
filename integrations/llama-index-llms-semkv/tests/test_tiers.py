"""Whole prompts that were asked before: a query engine's second call is served out of its first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.llms.semkv import SemKV

from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport
from workbench.tiered import tiered

QUESTION = "who leads Zur stul ?"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("chats", [True, False], ids=["chat", "completion"])
def test_the_same_question_twice(
    engine: Engine,
    index: VectorStoreIndex,
    reports: Callable[[], list[ReuseReport]],
    namespace: str,
    chats: bool,
    streamed: bool,
) -> None:
    def ask(*, reuse: bool) -> str:
        llm = SemKV(
            engine=engine, reuse=reuse, namespace=namespace, max_tokens=8, is_chat_model=chats
        )
        assert engine.reset_prefix_cache()
        asking = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=streamed)
        response = asking.query(QUESTION)
        return "".join(response.response_gen) if streamed else str(response)

    expected = ask(reuse=False)
    reports()
    with tiered(engine) as tiering:
        assert ask(reuse=True) == expected
        tiering.settle()
        assert ask(reuse=True) == expected
    first, second = reports()
    assert first.tiers == {"exact_text": "miss", "semantic_text": "miss"}
    assert (first.served_by, first.donor, first.kv_cache) == (None, None, "miss")
    assert second.tiers == {"exact_text": "hit", "semantic_text": "skip"}
    assert (second.served_by, second.kv_cache) == ("exact_text", "hit")
    assert second.chunk_ids == (second.donor,)
    assert second.exact_tokens == second.prompt_tokens - 1
