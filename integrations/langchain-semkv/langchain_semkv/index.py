"""`SemKVIndex`: the store as a destination of `langchain_core.indexing.index`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.indexing import UpsertResponse
from langchain_core.indexing.base import DeleteResponse, DocumentIndex
from langchain_core.prompts import BasePromptTemplate
from langchain_core.vectorstores import VectorStore
from pydantic import Field

from langchain_semkv.base import SemKVModel
from langchain_semkv.precompute import as_prompted, store
from semkv_rag.corpus.context import DEFAULT_CONTEXT
from semkv_rag.errors import OptionError


class SemKVIndex(DocumentIndex):
    """Keeps the documents' KV, and their vectors when it is given a vector store, as one.

    For `index(documents, record_manager, SemKVIndex(...), cleanup="incremental", ...)`: the record
    manager says which documents are new, changed and gone, and just those are computed and removed.
    Each document is a source of the store, by its id.

    It is a retriever too, which asks the vector store.

    Raises:
        OptionError: the model has no store; or it is asked for documents and has no vector store.
        EngineError: the engine or the server does not answer.

    Example:
        ```python
        destination = SemKVIndex(llm=llm, vector_store=vectors)
        index(documents, records, destination, cleanup="incremental", source_id_key="source")
        ```
    """

    llm: Any
    """The `ChatSemKV` or `SemKVLLM` whose model computes the documents, into its store."""
    vector_store: VectorStore | None = None
    """Gets the same documents; None keeps their KV alone."""
    prefix: str = ""
    """The text every prompt will start with. Documents are computed behind it alone: for other contexts
    use `SemKVPrecompute`, which is given a source as a whole."""
    document_prompt: BasePromptTemplate[str] | None = None
    """How the chain writes a document into its prompt, when it writes more than its text."""
    namespace: str | None = None
    """The tenant the documents belong to; the one `llm` has, when left out."""
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Of the vector store's search, such as `k`."""

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """Store documents; one with the id of another takes its place, one without gets one.

        `failed` has the ids whose KV could not be stored. They are in the vector store all the same, and
        computed with each question.
        """
        documents = [
            item if item.id else item.model_copy(update={"id": str(uuid.uuid4())}) for item in items
        ]
        by_id = {str(document.id): document for document in documents}
        texts = {id_: [as_prompted(one, self.document_prompt)] for id_, one in by_id.items()}
        # A document alone has nothing before it.
        result = store(
            self._model,
            texts,
            namespace=self.namespace,
            prefix=self.prefix,
            context=DEFAULT_CONTEXT,
        )
        if self.vector_store is not None:
            self.vector_store.add_documents(list(by_id.values()), ids=list(by_id), **kwargs)
        failed = {failure.source for failure in result.failures}
        return UpsertResponse(
            succeeded=[id_ for id_ in by_id if id_ not in failed],
            failed=[id_ for id_ in by_id if id_ in failed],
        )

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """Remove documents, and the stored KV that no other document has.

        Raises:
            OptionError: no ids are given.
        """
        if ids is None:
            raise OptionError("give the ids of the documents that go")
        if self.vector_store is None:
            return DeleteResponse(num_deleted=self._forget(ids), num_failed=0)
        there = [str(document.id) for document in self.vector_store.get_by_ids(ids)]
        if there:
            self.vector_store.delete(there, **kwargs)
        self._forget(ids)
        return DeleteResponse(num_deleted=len(there), succeeded=there, num_failed=0, failed=[])

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """The documents with these ids, as the vector store has them."""
        return self._vectors.get_by_ids(ids)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._vectors.similarity_search(query, **{**self.search_kwargs, **kwargs})

    @property
    def _model(self) -> SemKVModel[Any]:
        model: SemKVModel[Any] = self.llm
        return model

    @property
    def _vectors(self) -> VectorStore:
        if self.vector_store is None:
            raise OptionError("this index keeps KV alone: give it a vector_store to get documents")
        return self.vector_store

    def _forget(self, ids: Sequence[str]) -> int:
        return self._model.backend().forget(ids, namespace=self.namespace or self._model.namespace)
