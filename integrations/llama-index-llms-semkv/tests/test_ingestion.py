"""A corpus that changes, through `IngestionPipeline`: what is stored is what the model will see now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, SummaryIndex, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode, MetadataMode, TextNode, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.semkv import KVPrecompute, SemKV, precompute_index

from semkv_rag.corpus import prefix_tokens
from semkv_rag.corpus.split import tokenize
from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import TokenArray
from semkv_rag.store import chunk_id

A = "The Tre klim school is led by Ivan . It has a violet flag ."
A2 = "The Tre klim school is led by Liam . It has a violet flag ."
B = "The Mok pis club began in 1988 . It is based in Dijon ."
C = "The Zur stul lab keeps a owl as mascot . It has 54 members ."


class Paragraphs(TransformComponent):
    """A splitter at empty lines."""

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return [
            TextNode(
                text=text,
                id_=f"{node.node_id}-{number}",
                metadata=node.metadata,
                relationships={"1": node.as_related_node_info()},
            )
            for node in nodes
            for number, text in enumerate(node.get_content(MetadataMode.NONE).split("\n\n"))
        ]


class Shelf(SimpleVectorStore):
    """A vector store that keeps its nodes' texts, as those of databases do."""

    stores_text: bool = True
    kept: dict[str, BaseNode] = {}  # noqa: RUF012 (a pydantic field)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.kept.update({node.node_id: node for node in nodes})
        return super().add(nodes, **kwargs)

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        self.kept = {id_: n for id_, n in self.kept.items() if n.ref_doc_id != ref_doc_id}
        super().delete(ref_doc_id, **kwargs)

    def query(self, query: Any, **kwargs: Any) -> Any:
        query.node_ids = query.node_ids or None  # an index that holds no nodes itself gives none
        found = super().query(query, **kwargs)
        found.nodes = [self.kept[id_] for id_ in found.ids or ()]
        return found

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        return list(self.kept.values())


@pytest.fixture
def llm(engine: Engine, namespace: str) -> SemKV:
    return SemKV(engine=engine, namespace=namespace, max_tokens=4)


@pytest.fixture
def pipeline(llm: SemKV, embedding: BaseEmbedding) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[Paragraphs(), behind_nothing(llm), embedding],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=Shelf(),
    )


def documents(**texts: str) -> list[Document]:
    return [Document(text=text, id_=name) for name, text in texts.items()]


def stored(engine: Engine, namespace: str) -> dict[str, float]:
    """The chunks of a namespace, with the times their KV was written."""
    assert engine.store is not None
    return {
        chunk.id: engine.store.path(chunk.model, chunk.namespace, chunk.id).stat().st_mtime_ns
        for chunk in engine.store.chunks(engine.fingerprint, namespace)
    }


def behind_nothing(llm: SemKV, **options: Any) -> KVPrecompute:
    """Each node is stored once, and not behind a template."""
    return KVPrecompute(llm=llm, **{"prefix": "", "context": ("prefix",), **options})


def id_of(engine: Engine, namespace: str, text: str) -> str:
    return behind(engine, namespace, prefix_tokens(engine.tokenizer), text)


def behind(engine: Engine, namespace: str, context: TokenArray, text: str) -> str:
    return chunk_id(engine.fingerprint, namespace, context, tokenize(engine.tokenizer, text))


def report(llm: SemKV, text: str) -> ReuseReport:
    response = llm.complete(f"{text} Question : who leads Tre klim ? Answer :")
    return ReuseReport.from_mapping(response.additional_kwargs["semkv"])


def covered(llm: SemKV, text: str) -> int:
    """How many tokens come out of the store when `text` stands behind something else."""
    seen = report(llm, f"Nobody knows why . {text}")
    return seen.exact_tokens + seen.reused_tokens


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_incremental_corpus(
    engine: Engine, namespace: str, llm: SemKV, pipeline: IngestionPipeline, asynchronous: bool
) -> None:
    async def run(*given: Document) -> None:
        if asynchronous:
            await pipeline.arun(documents=list(given))
        else:
            pipeline.run(documents=list(given))

    await run(*documents(one=f"{A}\n\n{B}", two=C))
    first = stored(engine, namespace)
    assert first.keys() == {id_of(engine, namespace, text) for text in (A, B, C)}

    # Again, unchanged: nothing is computed.
    await run(*documents(one=f"{A}\n\n{B}", two=C))
    assert stored(engine, namespace) == first

    # One paragraph of one document changes: just that one is computed, the old one is gone.
    await run(*documents(one=f"{A2}\n\n{B}", two=C))
    second = stored(engine, namespace)
    assert second.keys() == {id_of(engine, namespace, text) for text in (A2, B, C)}
    for text in (B, C):
        assert second[id_of(engine, namespace, text)] == first[id_of(engine, namespace, text)]
    assert report(llm, A2).kv_cache == "hit"
    # Of the old one no chunk is left to be used. (What A and A2 share may be found in A2's.)
    assert id_of(engine, namespace, A) not in report(llm, A).chunk_ids

    # Back to the old text: the pipeline's cache has seen it, and must not hide that it is needed.
    await run(*documents(one=f"{A}\n\n{B}", two=C))
    assert stored(engine, namespace).keys() == first.keys()
    assert id_of(engine, namespace, A) in report(llm, A).chunk_ids

    # A document that is not there any more is gone, and with it its source.
    await run(*documents(two=C))
    assert stored(engine, namespace).keys() == {id_of(engine, namespace, C)}
    assert engine.store is not None
    assert [s.name for s in engine.store.sources(engine.fingerprint, namespace)] == ["two"]
    assert report(llm, f"{A} {B}").kv_cache == "miss"


def test_what_it_retrieves_is_reused(
    engine: Engine, llm: SemKV, pipeline: IngestionPipeline, embedding: BaseEmbedding
) -> None:
    pipeline.run(documents=documents(one=f"{A}\n\n{B}", two=C))
    assert pipeline.vector_store is not None
    index = VectorStoreIndex.from_vector_store(pipeline.vector_store, embed_model=embedding)
    (hit,) = index.as_retriever(similarity_top_k=1).retrieve("who leads Tre klim ?")
    text = hit.node.get_content(MetadataMode.LLM)
    assert text == A
    assert covered(llm, text) == llm.count_tokens(text)


def test_metadata_that_the_model_sees_is_stored_with_the_text(engine: Engine, llm: SemKV) -> None:
    node = TextNode(
        text=A,
        metadata={"school": "Tre klim", "secret": "for the retriever"},
        excluded_llm_metadata_keys=["secret"],
    )
    (passed,) = behind_nothing(llm)([node])
    assert passed is node
    seen = node.get_content(MetadataMode.LLM)
    assert "Tre klim\n\n" in seen
    assert "secret" not in seen
    assert covered(llm, seen) == llm.count_tokens(seen) > llm.count_tokens(A)


def test_a_chunk_right_behind_the_prompt_prefix_is_exact(llm: SemKV) -> None:
    prefix = "Nobody knows why the library was dark . " * 3
    behind_nothing(llm, prefix=prefix)([TextNode(text=A)])
    seen = report(llm, prefix + A)
    assert seen.exact_tokens == llm.count_tokens(prefix + A)


@pytest.mark.parametrize("template", [None, PromptTemplate("Read : {context_str} {query_str} ?")])
def test_the_prompt_prefix_is_found_in_the_query_engine_s_template(
    engine: Engine,
    namespace: str,
    reports: Callable[[], list[ReuseReport]],
    template: PromptTemplate | None,
) -> None:
    llm = SemKV(engine=engine, namespace=namespace, max_tokens=1)
    index = SummaryIndex([TextNode(text=A), TextNode(text=B)])
    precompute_index(index, llm, text_qa_template=template)
    engine.reset_prefix_cache()
    index.as_query_engine(llm=llm, text_qa_template=template).query("who leads Tre klim ?")
    (seen,) = reports()
    prefix = llm.prefix_of(template)
    assert ("Read :" if template else "Context information is below") in prefix
    assert seen.exact_tokens >= llm.count_tokens(A), "a prefix of a few tokens is not reused itself"
    assert seen.reused_tokens == llm.count_tokens(B)


def test_nodes_behind_the_node_before(engine: Engine, namespace: str, llm: SemKV) -> None:
    cache = IngestionCache()

    def run(*context: str) -> None:
        steps = [Paragraphs(), behind_nothing(llm, context=context)]
        IngestionPipeline(transformations=steps, cache=cache).run(
            documents=documents(one=f"{A}\n\n{B}", two=C)
        )

    run("prefix")
    alone = {id_of(engine, namespace, text) for text in (A, B, C)}
    assert stored(engine, namespace).keys() == alone
    run("prefix", "left")  # the pipeline's cache knows that this is another step
    neighbour = np.concatenate((prefix_tokens(engine.tokenizer), tokenize(engine.tokenizer, A)))
    left = behind(engine, namespace, neighbour, B)
    assert alone | {left} < stored(engine, namespace).keys()
    assert len(stored(engine, namespace)) == 2 * len(alone)
    assert left in report(llm, f"Nobody knows why . {A} {B}").chunk_ids
    with pytest.raises(ValueError, match="context"):
        KVPrecompute(llm=llm, context=("right",))
    index = SummaryIndex([TextNode(text=text) for text in (A, B)])
    assert precompute_index(index, llm, prefix="", context=("left",)).failures == []


def test_the_cache_hides_no_needed_run(engine: Engine, namespace: str, llm: SemKV) -> None:
    cache = IngestionCache()

    def run(model: SemKV, prefix: str = "") -> None:
        steps = [Paragraphs(), behind_nothing(model, prefix=prefix)]
        IngestionPipeline(transformations=steps, cache=cache).run(
            documents=documents(one=f"{A}\n\n{B}")
        )

    run(llm)
    assert len(stored(engine, namespace)) == 2
    assert engine.store is not None
    engine.store.remove(engine.fingerprint, namespace, [id_of(engine, namespace, A)])
    run(llm)
    assert len(stored(engine, namespace)) == 2
    other = SemKV(engine=engine, namespace=f"{namespace}-other")
    run(other)
    assert len(stored(engine, f"{namespace}-other")) == 2
    run(llm, prefix="Nobody knows . ")
    assert len(stored(engine, namespace)) == 3  # the prompt prefix, and both behind it


def test_nothing_is_run_twice_for_nothing(engine: Engine, namespace: str, llm: SemKV) -> None:
    step = behind_nothing(llm)
    step([TextNode(text=A)])
    assert step.to_dict() == behind_nothing(llm).to_dict()
    assert engine.fingerprint in str(step.to_dict())


def test_worker_processes_store_through_this_engine(
    engine: Engine, namespace: str, llm: SemKV
) -> None:
    pipeline = IngestionPipeline(transformations=[behind_nothing(llm)])
    nodes = pipeline.run(documents=documents(one=A, two=B, three=C), num_workers=2)
    assert sorted(node.get_content() for node in nodes) == sorted([A, B, C])
    assert stored(engine, namespace).keys() == {
        id_of(engine, namespace, text) for text in (A, B, C)
    }


async def test_worker_processes_of_an_event_loop(
    engine: Engine, namespace: str, llm: SemKV
) -> None:
    pipeline = IngestionPipeline(transformations=[behind_nothing(llm)])
    await pipeline.arun(nodes=[TextNode(text=text) for text in (A, B)], num_workers=2)
    assert stored(engine, namespace).keys() == {id_of(engine, namespace, text) for text in (A, B)}


def test_a_worker_says_what_went_wrong_here(engine: Engine) -> None:
    import pickle

    step = behind_nothing(SemKV(engine=engine, namespace="n" * 128))
    worker = pickle.loads(pickle.dumps(step))
    assert worker.to_dict() == step.to_dict()
    step.llm.namespace = "n" * 129  # too long a name
    with pytest.raises(EngineError, match="namespace"):
        worker([TextNode(text=A)])


def test_an_index_that_is_there(
    engine: Engine, namespace: str, llm: SemKV, embedding: BaseEmbedding
) -> None:
    nodes = [TextNode(text=text) for text in (A, B)]
    result = precompute_index(
        VectorStoreIndex(nodes, embed_model=embedding), llm, prefix="", context=("prefix",)
    )
    assert result.chunks_captured == 2
    assert precompute_index(SummaryIndex(nodes), llm, prefix="", context=("prefix",)).unchanged == 2
    assert len(stored(engine, namespace)) == 2
    assert behind_nothing(llm).forget([nodes[0].node_id, "never there"]) == 1
    assert stored(engine, namespace).keys() == {id_of(engine, namespace, B)}


def test_an_index_over_a_vector_database(
    engine: Engine, namespace: str, llm: SemKV, embedding: BaseEmbedding
) -> None:
    shelf = Shelf()
    nodes = [TextNode(text=text, embedding=embedding.get_text_embedding(text)) for text in (A, C)]
    shelf.add(nodes)
    index = VectorStoreIndex.from_vector_store(shelf, embed_model=embedding)
    assert precompute_index(index, llm, prefix="", context=("prefix",)).chunks_captured == 2

    class Closed(Shelf):
        def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
            raise NotImplementedError

    closed = VectorStoreIndex.from_vector_store(Closed(), embed_model=embedding)
    with pytest.raises(OptionError, match=r"KVPrecompute\(llm=llm\)\(nodes\)"):
        precompute_index(closed, llm)
