"""Ingestion: what LangChain's own machinery says is new, changed and gone is computed and removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import report, reused
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM, SemKVPrecompute
from langchain_tests.integration_tests.indexer import (
    AsyncDocumentIndexTestSuite,
    DocumentIndexerTestSuite,
)

from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError
from semkv_rag.report import ReuseReport
from workbench.settings import ROOT

SCHOOLS = sorted((ROOT / "examples" / "corpus" / "schools").glob("*.txt"))
BY_SOURCE: dict[str, Any] = {
    "cleanup": "incremental",
    "source_id_key": "source",
    "key_encoder": "sha256",
}


def _vectors() -> InMemoryVectorStore:
    return InMemoryVectorStore(DeterministicFakeEmbedding(size=8))


def _texts() -> dict[str, list[str]]:
    """Each school's paragraphs, by its file's name."""
    return {path.stem: path.read_text().strip().split("\n\n") for path in SCHOOLS[:4]}


VARIANTS = 2
"""Each document is stored behind the prompt prefix and, as it has no neighbour, behind a passage."""


def _documents(texts: dict[str, list[str]]) -> list[Document]:
    return [
        Document(text, metadata={"source": name}) for name, parts in texts.items() for text in parts
    ]


class Kept:
    """What the store has in a namespace."""

    def __init__(self, engine: Engine, namespace: str) -> None:
        assert engine.store is not None
        self._store, self._model, self._namespace = engine.store, engine.fingerprint, namespace

    def chunks(self) -> dict[str, int]:
        """The chunks' ids, and when each file was written."""
        ids = {
            id_
            for source in self._store.sources(self._model, self._namespace)
            for id_ in source.chunk_ids
        }
        paths = {id_: Path(self._store.path(self._model, self._namespace, id_)) for id_ in ids}
        return {id_: path.stat().st_mtime_ns for id_, path in paths.items()}

    def files(self) -> int:
        """The chunk files there are, in the index or not."""
        some = self._store.path(self._model, self._namespace, "0" * 64)
        return len(list(some.parent.parent.glob("*/*.safetensors")))


@pytest.fixture
def llm(engine: Engine, namespace: str) -> ChatSemKV:
    return ChatSemKV(engine=engine, namespace=namespace, max_tokens=2)


@pytest.fixture
def kept(engine: Engine, namespace: str) -> Kept:
    return Kept(engine, namespace)


def _is_stored(engine: Engine, llm: ChatSemKV, text: str) -> bool:
    """Whether all of a prompt is found in the store; its last token is always computed."""
    engine.reset_prefix_cache()
    return reused(report(llm.invoke(text))) == len(engine.tokenizer.encode(text)) - 1


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_record_manager_s_clean_up_drives_the_store_s(
    engine: Engine, llm: ChatSemKV, kept: Kept, asynchronous: bool
) -> None:
    records, texts = InMemoryRecordManager("records"), _texts()
    records.create_schema()
    vectors = _vectors()
    destination = SemKVIndex(llm=llm, vector_store=vectors)

    async def run() -> dict[str, int]:
        documents = _documents(texts)
        if asynchronous:
            return dict(await aindex(documents, records, destination, **BY_SOURCE))
        return dict(index(documents, records, destination, **BY_SOURCE))

    everything = sum(map(len, texts.values()))
    assert (await run())["num_added"] == everything
    before = kept.chunks()
    assert len(before) == VARIANTS * everything == kept.files()
    assert (await run())["num_skipped"] == everything
    assert kept.chunks() == before, "nothing is computed again"

    changed, stale = next(iter(texts)), texts[next(iter(texts))][0]
    texts[changed][0] = "It is old . " + stale
    assert (await run()) == {
        "num_added": 1,
        "num_updated": 0,
        "num_skipped": everything - 1,
        "num_deleted": 1,
    }
    after = kept.chunks()
    untouched = after.items() & before.items()
    assert len(untouched) == VARIANTS * (everything - 1), "the others stand untouched"
    assert len(after) == VARIANTS * everything == kept.files()
    assert _is_stored(engine, llm, texts[changed][0])
    old = before.keys() - after.keys()
    assert len(old) == VARIANTS
    assert old.isdisjoint(report(llm.invoke(stale)).chunk_ids)
    assert {doc["text"] for doc in vectors.store.values()} == {
        text for parts in texts.values() for text in parts
    }

    gone = texts.pop(changed)
    full = {**BY_SOURCE, "cleanup": "full"}
    index(_documents(texts), records, destination, **full)
    assert len(kept.chunks()) == VARIANTS * (everything - len(gone)) == kept.files()
    assert not any(doc["text"] in gone for doc in vectors.store.values())


def test_a_transformer_stores_and_passes_on(engine: Engine, llm: ChatSemKV, kept: Kept) -> None:
    texts = _texts()
    step = SemKVPrecompute(llm)
    documents = _documents(texts)
    assert list(step.transform_documents(documents)) == documents
    assert step.result is not None
    assert step.result.chunks_captured == VARIANTS * len(documents)
    before = kept.chunks()
    step.transform_documents(documents)
    assert step.result.unchanged == len(texts)
    texts[next(iter(texts))].pop()
    step.transform_documents(_documents(texts))
    assert kept.chunks().items() < before.items(), "what a source no longer has is gone"


def test_documents_behind_the_one_before_of_their_source(llm: ChatSemKV, kept: Kept) -> None:
    texts = {name: parts[:2] for name, parts in _texts().items()}
    SemKVPrecompute(llm, context=["prefix"]).transform_documents(_documents(texts))
    alone = kept.chunks()
    step = SemKVPrecompute(llm)
    step.transform_documents(_documents(texts))
    assert step.result is not None
    assert step.result.chunks_captured == 2 * len(texts), "the second of each, behind the first"
    assert kept.chunks().items() > alone.items()
    with pytest.raises(OptionError, match="use prefix, left"):
        SemKVPrecompute(llm, context=["right"])  # type: ignore[list-item]


async def test_what_the_chain_writes_is_what_is_stored(
    engine: Engine, llm: ChatSemKV, namespace: str
) -> None:
    written = PromptTemplate.from_template("{source} : {page_content}")
    text = _texts()["mok-pis"][1]
    document = Document(text, metadata={"source": "Mok pis"})
    step = SemKVPrecompute(llm, document_prompt=written, prefix="Question : ")
    await step.atransform_documents([document])
    prompt = f"Question : Mok pis : {text} who leads it ?"
    engine.reset_prefix_cache()
    found = report(llm.invoke(prompt))
    assert found.exact_tokens >= len(engine.tokenizer.encode(prompt)) - 6


@pytest.mark.parametrize("chat", [True, False])
def test_the_prompt_prefix_is_found_in_the_chain_s_prompt(
    engine: Engine, namespace: str, chat: bool
) -> None:
    kind: Any = ChatSemKV if chat else SemKVLLM
    llm = kind(engine=engine, namespace=namespace, max_tokens=2)
    prompt: Any
    if chat:
        human = ("human", "{documents} Question : {question}")
        prompt = ChatPromptTemplate.from_messages([("system", "You know the schools ."), human])
    else:
        prompt = PromptTemplate.from_template("You know . {documents} Question : {question}")
    text = _texts()["mok-pis"][1]
    step = SemKVPrecompute(llm, prompt=prompt, document_variable="documents")
    step.transform_documents([Document(text)])
    engine.reset_prefix_cache()
    asked = llm.generate_prompt([prompt.invoke({"documents": text, "question": "who leads it ?"})])
    seen = report(asked.generations[0][0].message) if chat else _report_of(asked)
    assert seen.exact_tokens >= len(engine.tokenizer.encode(text))
    with pytest.raises(OptionError, match="document_variable"):
        SemKVPrecompute(llm, prompt=prompt)
    with pytest.raises(OptionError, match="not both"):
        SemKVPrecompute(llm, prompt=prompt, document_variable="documents", prefix="")


def _report_of(result: LLMResult) -> ReuseReport:
    info = result.generations[0][0].generation_info
    assert info is not None
    return ReuseReport.from_mapping(info["semkv"])


def test_without_a_store_there_is_nothing_to_keep_it_in(engine: Engine) -> None:
    class Storeless:
        model, store, reuse = engine.model, None, engine.reuse

    with pytest.raises(OptionError, match="store"):
        SemKVPrecompute(ChatSemKV(engine=Storeless())).transform_documents([Document("a")])


def test_an_index_of_kv_alone(llm: ChatSemKV, kept: Kept) -> None:
    alone = SemKVIndex(llm=llm)
    done = alone.upsert([Document("The flag is red .", id="1"), Document("It is led by Kim .")])
    assert len(done["succeeded"]) == 2
    assert len(kept.chunks()) == 2 * VARIANTS
    assert alone.delete(["1", "unknown"])["num_deleted"] == 1
    assert len(kept.chunks()) == VARIANTS == kept.files()


def test_an_index_is_a_retriever(llm: ChatSemKV) -> None:
    kv = SemKVIndex(llm=llm, vector_store=_vectors(), search_kwargs={"k": 1})
    kv.upsert([Document("The flag is red .", id="1"), Document("It is led by Kim .", id="2")])
    assert [document.id for document in kv.invoke("The flag is red .")] == ["1"]


class TestStandard(DocumentIndexerTestSuite):
    """LangChain's standard tests of indexes."""

    @pytest.fixture
    def index(self, llm: ChatSemKV) -> SemKVIndex:
        return SemKVIndex(llm=llm, vector_store=_vectors())


class TestAsyncStandard(AsyncDocumentIndexTestSuite):
    @pytest.fixture
    async def index(self, llm: ChatSemKV) -> SemKVIndex:
        return SemKVIndex(llm=llm, vector_store=_vectors())
