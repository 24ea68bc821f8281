"""Asking, and what comes back beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport

# Long enough that a wrong answer shows, and the same number of tokens whatever is said.
SAMPLING: dict[str, Any] = {"max_tokens": 8, "sampling": {"ignore_eos": True}}
TEMPLATE = "{context} Question : {input} Answer :"


class Calls(BaseCallbackHandler):
    """Collects the reports of a chain's model calls; chains pass on nothing but the text."""

    def __init__(self) -> None:
        self.reports: list[ReuseReport] = []

    def on_llm_end(
        self, response: LLMResult, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        for generations in response.generations:
            for generation in generations:
                if isinstance(generation, ChatGeneration):
                    said = generation.message.response_metadata
                else:
                    said = generation.generation_info or {}
                self.reports.append(ReuseReport.from_mapping(said["semkv"]))


def report(message: AIMessage) -> ReuseReport:
    return ReuseReport.from_mapping(message.response_metadata["semkv"])


def reused(one: ReuseReport) -> int:
    """Tokens whose KV stood in the store, the ones computed again included."""
    return one.exact_tokens + one.reused_tokens


def as_documents(texts: Sequence[str]) -> list[Document]:
    return [Document(text.strip(), metadata={"source": f"{n}"}) for n, text in enumerate(texts)]


def plain(engine: Engine, prompt: str) -> str:
    """Plain vLLM's answer: nothing reused, not even from its own prefix cache."""
    assert engine.reset_prefix_cache()
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return engine.generate(prompt, sampling=sampling, reuse=ReuseOptions(enabled=False)).text
