"""Nodes as documents: a name, and the texts that a model will see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llama_index.core.schema import BaseNode, MetadataMode


def by_document(nodes: Iterable[BaseNode]) -> list[tuple[str, list[str]]]:
    """The texts that the model will see, by the document that their nodes are of."""
    documents: dict[str, list[str]] = {}
    for node in nodes:
        documents.setdefault(node.ref_doc_id or node.node_id, []).extend(_seen_texts([node]))
    return list(documents.items())


def _seen_texts(nodes: Iterable[BaseNode]) -> Sequence[str]:
    """The nodes' texts as a model gets them, metadata included; those without text left out."""
    texts = (node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes)
    return [text for text in texts if text.strip()]
