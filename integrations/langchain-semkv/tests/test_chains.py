"""Chains that people have, with the model changed: plain vLLM's answers, and reuse in the report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from asking import SAMPLING, TEMPLATE, Calls, as_documents, plain, reused
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_semkv import ChatSemKV, SemKVLLM

from semkv_rag.engine import Engine

CLASSES = [ChatSemKV, SemKVLLM]
AS_PLAIN: list[dict[str, Any]] = [{"reuse": False}, {"ratio": 1.0}]


class Fixed(BaseRetriever):
    """Finds the same documents every time."""

    found: list[Document]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self.found


def _join(documents: Sequence[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def _prompt(model: type) -> Any:
    return (ChatPromptTemplate if model is ChatSemKV else PromptTemplate).from_template(TEMPLATE)


def stuff(model: type, engine: Engine, **options: Any) -> Runnable[Any, Any]:
    llm = model(engine=engine, **SAMPLING, **options)
    return create_stuff_documents_chain(llm, _prompt(model), document_separator="\n")


def lcel(model: type, engine: Engine, texts: list[str], **options: Any) -> Runnable[Any, Any]:
    retriever = Fixed(found=as_documents(texts))
    given = {"context": retriever | _join, "input": RunnablePassthrough()}
    return given | _prompt(model) | model(engine=engine, **SAMPLING, **options) | StrOutputParser()


@pytest.fixture
def asked(documents: list[str], question: str) -> str:
    """The prompt that the chains make."""
    return TEMPLATE.format(context=_join(as_documents(documents)), input=question)


@pytest.fixture
def expected(engine: Engine, asked: str) -> str:
    return plain(engine, asked)


@pytest.mark.parametrize("options", AS_PLAIN)
@pytest.mark.parametrize("model", CLASSES)
def test_stuff_chain_answers_as_plain_vllm(
    engine: Engine, documents: list[str], question: str, expected: str, model: type, options: Any
) -> None:
    engine.reset_prefix_cache()
    calls = Calls()
    chain = stuff(model, engine, **options)
    given = {"context": as_documents(documents), "input": question}
    assert chain.invoke(given, config={"callbacks": [calls]}) == expected
    assert calls.reports[0].kv_cache == ("hit" if "ratio" in options else "skip")


@pytest.mark.parametrize("options", AS_PLAIN)
@pytest.mark.parametrize("model", CLASSES)
async def test_lcel_in_every_way(
    engine: Engine, documents: list[str], question: str, expected: str, model: type, options: Any
) -> None:
    chain = lcel(model, engine, documents, **options)
    engine.reset_prefix_cache()
    assert chain.invoke(question) == expected
    assert "".join(chain.stream(question)) == expected
    assert chain.batch([question] * 3) == [expected] * 3
    assert await chain.ainvoke(question) == expected
    assert "".join([text async for text in chain.astream(question)]) == expected
    assert await chain.abatch([question] * 3) == [expected] * 3


@pytest.mark.parametrize("model", CLASSES)
def test_the_report_shows_what_the_documents_allow(
    engine: Engine, documents: list[str], question: str, answer: str, model: type
) -> None:
    engine.reset_prefix_cache()
    calls = Calls()
    chain = lcel(model, engine, documents)
    text = chain.invoke(question, config={"callbacks": [calls]})
    assert text.split()[0] == answer
    (report,) = calls.reports
    retrieved = len(engine.tokenizer.encode(_join(as_documents(documents))))
    assert report.kv_cache == "hit"
    assert reused(report) >= 0.95 * retrieved
    assert report.recomputed_tokens < report.reused_tokens / 2


def test_a_retrieval_chain_passes_the_documents_on(
    engine: Engine, documents: list[str], question: str, expected: str
) -> None:
    retriever = Fixed(found=as_documents(documents))
    chain = create_retrieval_chain(retriever, stuff(ChatSemKV, engine, ratio=1.0))
    answered = chain.invoke({"input": question})
    assert answered["answer"] == expected
    assert answered["context"] == as_documents(documents)


async def test_batches_keep_their_order(engine: Engine, documents: list[str], asked: str) -> None:
    subjects = ["Mok pis", "Som mel", "Zur stul"]
    asking = [asked.replace("Zur stul ?", f"{subject} ?") for subject in subjects]
    alone = [plain(engine, prompt) for prompt in asking]
    assert len(set(alone)) == 3
    for model in CLASSES:
        chain = model(engine=engine, **SAMPLING, ratio=1.0) | StrOutputParser()
        assert chain.batch(asking * 4) == alone * 4
        assert await chain.abatch(asking * 4) == alone * 4
        together = await asyncio.gather(*(chain.ainvoke(prompt) for prompt in asking * 4))
        assert together == alone * 4
