"""KV stored ahead, from LlamaIndex: in an ingestion pipeline, or for an index that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode
from llama_index.llms.semkv.base import SemKV
from llama_index.llms.semkv.deletions import Forgets, follow_deletions
from llama_index.llms.semkv.documents import by_document
from llama_index.llms.semkv.routing import Routed, Window

from semkv_rag.corpus import DEFAULT_CONTEXT, ContextMode, PrecomputeResult
from semkv_rag.errors import EngineError, OptionError

Documents = Sequence[tuple[str, Sequence[str]]]


class KVPrecompute(Forgets):
    """Stores the KV of the nodes that pass through an `IngestionPipeline`; they go on unchanged.

    Put it behind the splitter and whatever writes metadata that the model sees: what is stored is
    `node.get_content(MetadataMode.LLM)`, the text that will stand in prompts. Each document is one
    source of the store, by its `ref_doc_id`. When it comes again, just its new chunks are computed
    and those it no longer has are removed; a document that the pipeline drops from its docstore
    (`UPSERTS_AND_DELETE`) goes from the store too.

    With `num_workers` all workers send their nodes to this process, which has the engine. Give such
    a pipeline documents, not nodes: a document whose nodes reach several workers keeps only those of
    one.

    Raises:
        OptionError: the model has no store.
        EngineError: the model cannot be served with reuse, or a document could not be stored.

    Example:
        ```python
        llm = SemKV(model="Qwen/Qwen3-8B", store="kv-store")
        IngestionPipeline(transformations=[SentenceSplitter(), KVPrecompute(llm=llm), embedding])
        ```
    """

    llm: SemKV = Field(description="The model that will see the nodes.")
    prefix: str | None = Field(
        default=None,
        description="The text every prompt starts with: a chunk right behind it is exact. None: what"
        " stands before the retrieved texts in `text_qa_template`, as this model sees it.",
    )
    text_qa_template: BasePromptTemplate | None = Field(
        default=None,
        description="The query engine's own, if it has one; None: LlamaIndex's default.",
    )
    context: tuple[ContextMode, ...] = Field(
        default=DEFAULT_CONTEXT,
        min_length=1,
        description="What stands to a node's left while it is computed, a variant of it for each:"
        " prefix, left (the nodes before it of its document).",
    )

    _window: Window | None = PrivateAttr(default=None)

    def __init__(self, llm: SemKV, **options: Any) -> None:
        super().__init__(**{"llm": llm, **options})
        follow_deletions()

    @classmethod
    def class_name(cls) -> str:
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What an `IngestionCache` tells runs apart by.

        Model and store are in it, and the store's last removal: nodes that were run before are run
        again when it is another model or store now, or when chunks have gone since.
        """
        return {
            "class_name": self.class_name(),
            "model": self.llm.backend().fingerprint(),
            "store": self.llm.backend().store_id(namespace=self.llm.namespace),
            "namespace": self.llm.namespace,
            "prefix": self._prefix,
            "context": sorted(set(self.context)),
        }

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        self.store(by_document(nodes))
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self, nodes, **kwargs)

    def store(self, documents: Documents) -> PrecomputeResult:
        """Store documents, given as (`ref_doc_id`, its chunks' texts)."""
        return _store(self.llm, documents, self._prefix, self.context)

    @property
    def _prefix(self) -> str:
        return self.llm.prefix_of(self.text_qa_template) if self.prefix is None else self.prefix

    def forget(self, ref_doc_ids: Iterable[str]) -> int:
        """Remove documents; how many of them were there.

        For documents that are deleted otherwise than by the pipeline, as by `index.delete_ref_doc`.
        """
        return self.llm.backend().forget(ref_doc_ids, namespace=self.llm.namespace)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A worker process has no engine, and must not start another: it sends its nodes here.
        if self._window is None:
            self._window = Window(self.store)
        return Routed, (self._window.address, self.to_dict())


def precompute_index(
    index: BaseIndex[Any],
    llm: SemKV,
    *,
    prefix: str | None = None,
    text_qa_template: BasePromptTemplate | None = None,
    context: Sequence[ContextMode] = DEFAULT_CONTEXT,
) -> PrecomputeResult:
    """Store the KV of all nodes of an index that is there already.

    Costs nothing for documents that are stored and unchanged, so it may be called at each start.

    Args:
        prefix: the text every prompt starts with: a chunk right behind it is exact. None: what stands
            before the retrieved texts in `text_qa_template`, as this model sees it.
        text_qa_template: the query engine's own, if it has one; None: LlamaIndex's default.
        context: as of `KVPrecompute`; `left` needs an index that lists a document's nodes in order.

    Raises:
        OptionError: the index's nodes cannot be listed, or the model has no store.
        EngineError: the model cannot be served with reuse, or a document could not be stored.
    """
    found = llm.prefix_of(text_qa_template) if prefix is None else prefix
    return _store(llm, by_document(_nodes(index)), found, context)


def _store(
    llm: SemKV, documents: Documents, prefix: str, context: Sequence[ContextMode]
) -> PrecomputeResult:
    result = llm.backend().store_texts(
        documents, namespace=llm.namespace, prefix=prefix, context=context
    )
    if result.failures:
        first = result.failures[0]
        raise EngineError(
            f"{len(result.failures)} of {result.documents} documents were not stored, run it again: "
            f"{first.source}: {first.reason}"
        )
    return result


def _nodes(index: BaseIndex[Any]) -> Sequence[BaseNode]:
    vectors = getattr(index, "vector_store", None)
    if not getattr(vectors, "stores_text", False):
        return list(index.docstore.docs.values())
    try:
        return list(vectors.get_nodes(None))  # type: ignore[union-attr]
    except NotImplementedError as error:
        raise OptionError(
            f"{type(vectors).__name__} cannot list its nodes: give them to KVPrecompute(llm=llm)(nodes)"
        ) from error
