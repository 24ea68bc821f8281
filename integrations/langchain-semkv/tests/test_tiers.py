"""Whole prompts that were asked before: a chain's second call is served out of its first."""

from __future__ import annotations

from typing import Any

import pytest
from asking import SAMPLING, TEMPLATE, Calls, plain
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable
from langchain_semkv import ChatSemKV, SemKVLLM

from semkv_rag.engine import Engine
from workbench.tiered import tiered


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", [ChatSemKV, SemKVLLM])
def test_the_same_question_twice(
    engine: Engine,
    documents: list[str],
    question: str,
    namespace: str,
    model: type,
    streamed: bool,
) -> None:
    given = {"context": " ".join(documents), "input": question}
    expected = plain(engine, TEMPLATE.format(**given))
    calls = Calls()
    prompt: Any = ChatPromptTemplate if model is ChatSemKV else PromptTemplate
    llm = model(engine=engine, namespace=namespace, **SAMPLING)
    chain: Runnable[Any, str] = prompt.from_template(TEMPLATE) | llm | StrOutputParser()

    def ask() -> str:
        assert engine.reset_prefix_cache()
        config: Any = {"callbacks": [calls]}
        if streamed:
            return "".join(chain.stream(given, config=config))
        return chain.invoke(given, config=config)

    with tiered(engine) as tiering:
        assert ask() == expected
        tiering.settle()
        assert ask() == expected
    first, second = calls.reports
    assert first.tiers == {"exact_text": "miss", "semantic_text": "miss"}
    assert (first.served_by, first.donor, first.kv_cache) == (None, None, "miss")
    assert second.tiers == {"exact_text": "hit", "semantic_text": "skip"}
    assert (second.served_by, second.kv_cache) == ("exact_text", "hit")
    assert second.chunk_ids == (second.donor,)
    assert second.exact_tokens == second.prompt_tokens - 1
