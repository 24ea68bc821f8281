"""The demo's retrieval: real embeddings, and whole documents of one folder for the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from make_corpus import CORPUS, MAX_CHUNK_TOKENS
from query_engine import READERS
from retrieval import Remembering, make_nodes, make_retriever
from transformers import AutoTokenizer

QUESTIONS: list[dict[str, Any]] = json.loads((CORPUS / "questions.json").read_text())


@pytest.fixture(scope="module")
def retrieving() -> tuple[BaseRetriever, list[BaseNodePostprocessor]]:
    tokenizer = AutoTokenizer.from_pretrained(CORPUS.parent / "reader")
    return make_retriever(
        make_nodes(CORPUS, tokenizer, MAX_CHUNK_TOKENS), READERS.top_k, READERS.neighbours
    )


def _retrieve(
    retrieving: tuple[BaseRetriever, list[BaseNodePostprocessor]], question: str
) -> list[NodeWithScore]:
    retriever, postprocessors = retrieving
    hits = retriever.retrieve(question)
    for postprocessor in postprocessors:
        hits = postprocessor.postprocess_nodes(hits)
    return hits


@pytest.mark.slow
def test_the_model_gets_whole_documents_with_the_right_one_among_them(
    retrieving: tuple[BaseRetriever, list[BaseNodePostprocessor]],
) -> None:
    for question in QUESTIONS[::4]:
        hits = _retrieve(retrieving, question["question"])
        texts = [hit.node.get_content(MetadataMode.LLM) for hit in hits]
        assert (CORPUS / question["source"]).read_text().strip() in "\n\n".join(texts)
        assert len({hit.node.metadata["folder"] for hit in hits}) == 1
        together = "\n\n".join(texts)
        for title in {hit.node.metadata["title"] for hit in hits}:
            folder = CORPUS / hits[0].node.metadata["folder"]
            document = folder / f"{title.replace(' ', '-')}.txt"
            assert document.read_text().strip() in together


@pytest.mark.slow
def test_a_chunk_goes_to_the_model_without_its_metadata(
    retrieving: tuple[BaseRetriever, list[BaseNodePostprocessor]],
) -> None:
    hit = _retrieve(retrieving, QUESTIONS[0]["question"])[0]
    assert hit.node.get_content(MetadataMode.LLM) == hit.node.get_content(MetadataMode.NONE)
    assert hit.node.metadata["title"] in hit.node.get_content(MetadataMode.EMBED)


def test_a_question_is_looked_up_once_however_many_ways_it_is_answered() -> None:
    asked: list[str] = []

    class Counting(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            asked.append(query_bundle.query_str)
            return [NodeWithScore(node=TextNode(text=query_bundle.query_str), score=1.0)]

    retriever = Remembering(Counting())
    for question in ("a", "b", "a", "b"):
        assert [hit.node.get_content() for hit in retriever.retrieve(question)] == [question]
    assert asked == ["a", "b"]
