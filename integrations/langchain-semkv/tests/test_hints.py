"""What retrievers return is told to the models of this process, and never disturbs anybody."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_semkv import ChatSemKV

from semkv_rag.engine import Engine
from semkv_rag.llm import LocalBackend


class Echo(BaseRetriever):
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [Document(query)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What backends are told: text and namespace."""
    gc.collect()  # models of earlier tests hear it too
    heard: list[tuple[str, str | None]] = []

    def hint(self: LocalBackend, texts: Sequence[str], *, namespace: str | None = None) -> None:
        heard.extend((text, namespace) for text in texts)

    monkeypatch.setattr(LocalBackend, "hint", hint)
    return heard


async def test_every_retriever_is_heard(
    engine: Engine, namespace: str, told: list[tuple[str, str | None]]
) -> None:
    llm = ChatSemKV(engine=engine, namespace=namespace, max_tokens=1)
    deaf = ChatSemKV(engine=engine, namespace=f"{namespace}-deaf", hints=False, max_tokens=1)
    Echo().invoke("before")
    assert ("before", namespace) not in told, "no engine is started for a hint"
    for model in (llm, deaf):
        model.invoke("Hello")
    Echo().invoke("alone")
    await Echo().ainvoke("async")
    chain = RunnableLambda(lambda text: text) | Echo()
    assert chain.invoke("chained") == [Document("chained")]
    with ThreadPoolExecutor() as pool:
        list(pool.map(Echo().invoke, ("one", "two", "three")))
    own = {text for text, where in told if where == namespace}
    assert own == {"alone", "async", "chained", "one", "two", "three"}
    assert not any(where == deaf.namespace for _, where in told)
    del llm
    gc.collect()
    Echo().invoke("after")
    assert ("after", namespace) not in told, "a model that is gone hears nothing"


def test_a_hint_that_fails_fails_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: LocalBackend, texts: Sequence[str], *, namespace: str | None = None) -> None:
        raise RuntimeError("broken")

    llm = ChatSemKV(engine=engine, max_tokens=1)
    llm.invoke("Hello")
    monkeypatch.setattr(LocalBackend, "hint", broken)
    assert Echo().invoke("found") == [Document("found")]
    assert "broken" not in caplog.text


def test_models_come_and_go_while_retrievers_run(engine: Engine) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            ChatSemKV(engine=engine).backend()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            assert Echo().invoke(str(number)) == [Document(str(number))]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
