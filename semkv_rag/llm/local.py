"""Answers out of an engine in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import (
    DEFAULT_CONTEXT,
    ContextMode,
    OnProgress,
    PrecomputeResult,
    forget_sources,
    precompute_texts,
)
from semkv_rag.errors import OptionError
from semkv_rag.llm.answers import StreamedAnswer, whole_part
from semkv_rag.llm.fields import before, request_fields
from semkv_rag.llm.types import Part, Prompt
from semkv_rag.store import KVStore
from semkv_rag.store.cache_key import cache_key

if TYPE_CHECKING:
    from semkv_rag.corpus import Capturer
    from semkv_rag.engine import Engine, LoRARequest


class LocalBackend:
    """An `Engine` as a `Backend`. It is not closed here: whoever made it does that.

    Args:
        lora: the folder of the LoRA adapter that answers, and that chunks are stored for; None for the
            model alone. Looked at with each call: a retrained one is another adapter.
    """

    def __init__(self, engine: Engine, lora: str | None = None) -> None:
        self._engine, self._lora = engine, lora

    @property
    def model_name(self) -> str:
        return self._engine.model

    @property
    def context_window(self) -> int:
        return self._engine.max_model_len

    @property
    def has_chat_template(self) -> bool:
        return self._engine.has_chat_template

    @property
    def supports_tools(self) -> bool:
        return self._engine.supports_tools

    @property
    def supports_images(self) -> bool:
        return self._engine.supports_images

    def count_tokens(self, text: str) -> int:
        return len(self._engine.tokenizer.encode(text, add_special_tokens=False))

    def prefix_of(self, prompt: Prompt, marker: str) -> str:
        return before(marker, self._engine.prompt_text(prompt))

    def answer(self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]) -> Part:
        began = time.perf_counter()
        given, asked = self._request(prompt, fields, reuse)
        response = self._engine.respond(given, **asked)
        return self._ended(whole_part(response), began)

    async def aanswer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part:
        began = time.perf_counter()
        given, asked = self._request(prompt, fields, reuse)
        response = await self._engine.arespond(given, **asked)
        return self._ended(whole_part(response), began)

    def stream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]:
        began = time.perf_counter()
        given, asked = self._request(prompt, fields, reuse)
        chunks = self._engine.respond_stream(given, **asked)

        def parts() -> Generator[Part, None, None]:
            answer, first = StreamedAnswer(), None
            try:
                for chunk in chunks:
                    if (part := answer.take(chunk)) is not None:
                        first = first or time.perf_counter()
                        yield part
            finally:
                chunks.close()
            yield self._ended(answer.last(), began, first)

        return parts()

    async def astream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]:
        began = time.perf_counter()
        given, asked = self._request(prompt, fields, reuse)
        chunks = await self._engine.arespond_stream(given, **asked)

        async def parts() -> AsyncGenerator[Part, None]:
            answer, first = StreamedAnswer(), None
            try:
                async for chunk in chunks:
                    if (part := answer.take(chunk)) is not None:
                        first = first or time.perf_counter()
                        yield part
            finally:
                await chunks.aclose()
            yield self._ended(answer.last(), began, first)

        return parts()

    def store_texts(
        self,
        documents: Iterable[tuple[str, Sequence[str]]],
        *,
        namespace: str | None = None,
        prefix: str = "",
        context: Sequence[ContextMode] = DEFAULT_CONTEXT,
        on_progress: OnProgress | None = None,
    ) -> PrecomputeResult:
        return precompute_texts(
            self._capturer,
            documents,
            namespace=self._namespace(namespace),
            prefix=prefix,
            context=context,
            on_progress=on_progress,
        )

    def forget(self, sources: Iterable[str], *, namespace: str | None = None) -> int:
        where = self._namespace(namespace)
        return forget_sources(self._store, self.fingerprint(), where, sources)

    def fingerprint(self) -> str:
        return self._capturer.fingerprint

    def store_id(self, *, namespace: str | None = None) -> str:
        return cache_key(self._store, self.fingerprint(), self._namespace(namespace))

    @property
    def _capturer(self) -> Capturer:
        lora = self._adapter()
        return self._engine if lora is None else self._engine.with_adapter(lora)

    def _adapter(self) -> LoRARequest | None:
        if self._lora is None:
            return None
        from semkv_rag.engine.adapters import adapter_request

        return adapter_request(self._lora)

    @property
    def _store(self) -> KVStore:
        if self._engine.store is None:
            raise OptionError("the engine was started without a store: give it one")
        return self._engine.store

    def _namespace(self, namespace: str | None) -> str:
        return self._engine.reuse.namespace if namespace is None else namespace

    def _request(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> tuple[str | Sequence[Mapping[str, Any]], dict[str, Any]]:
        """What the engine is given: the prompt, and all else by name. What can be checked here is."""
        given = cast("str | Sequence[Mapping[str, Any]]", prompt)
        return given, {
            "fields": request_fields(prompt, fields),
            "reuse": ReuseOptions.from_mapping(reuse, base=self._engine.reuse),
            "lora_request": self._adapter(),
        }

    def _ended(self, part: Part, began: float, first: float | None = None) -> Part:
        """The last part with its times."""
        raw = dict(part.raw or {})
        if first is not None:
            raw["ttft_ms"] = (first - began) * 1000
        raw["latency_ms"] = (time.perf_counter() - began) * 1000
        return replace(part, raw=raw)
