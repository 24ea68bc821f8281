"""A LlamaIndex ingestion pipeline that keeps the KV of a changing corpus.

    python examples/llama_index_ingestion.py

What changes from a plain pipeline:

    +from llama_index.llms.semkv import KVPrecompute, SemKV
    -transformations=[splitter, embedding],
    +transformations=[splitter, KVPrecompute(llm=llm), embedding],

The pipeline's docstore finds out what is new, changed or gone; of a changed document just the changed
paragraphs are computed, and what is gone from the docstore is gone from the store.
"""

from __future__ import annotations

import tempfile

from _llama_index import ENGINE_ARGS, READER, Paragraphs, Reports, embedding, texts
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.semkv import KVPrecompute, SemKV


def main() -> None:
    with tempfile.TemporaryDirectory() as store:
        run(store)


def run(store: str) -> None:
    llm = SemKV(model=str(READER), store=store, engine_args=ENGINE_ARGS, max_tokens=4)
    splitter = Paragraphs()
    pipeline = IngestionPipeline(
        transformations=[splitter, KVPrecompute(llm=llm), embedding()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=SimpleVectorStore(),
    )
    corpus = texts()

    def ingest(what: str) -> None:
        documents = [Document(text=text, id_=name) for name, text in corpus.items()]
        nodes = pipeline.run(documents=documents)
        print(f"{what}: {len(corpus)} documents, {len(nodes)} nodes went through the pipeline")

    def ask(question: str, name: str) -> None:
        with Reports() as reports:
            answer = llm.complete(f"{corpus[name]} Question : {question} Answer :")
        print(f"    {question} {answer.text.strip()}\n    {reports}")

    ingest("at first")
    ask("which mascot does Brak trut have ?", "projects/brak-trut")
    ingest("unchanged")
    corpus["projects/brak-trut"] = corpus["projects/brak-trut"].replace("otter", "swan")
    del corpus["clubs/stir-tri"]
    ingest("one changed, one deleted")
    ask("which mascot does Brak trut have ?", "projects/brak-trut")


if __name__ == "__main__":
    main()
