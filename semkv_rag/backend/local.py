"""Answers out of an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from semkv_rag.backend.types import Part, Prompt
from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import OnProgress, PrecomputeResult, precompute_texts
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore

if TYPE_CHECKING:
    from semkv_rag.engine import Completion, Engine


class LocalBackend:
    """An `Engine` as a `Backend`. It is not closed here: whoever made it does that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def model_name(self) -> str:
        return self._engine.model

    @property
    def context_window(self) -> int:
        return self._engine.max_model_len

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._engine.tokenizer, "chat_template", None))

    @property
    def supports_tools(self) -> bool:
        return False

    @property
    def supports_images(self) -> bool:
        return False

    def count_tokens(self, text: str) -> int:
        return len(self._engine.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]) -> Part:
        completion = self._engine.generate(
            self._encode(prompt), sampling=fields, reuse=self._reuse(reuse)
        )
        return self._last_part(completion, len(completion.token_ids))

    async def aanswer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part:
        completion = await self._engine.agenerate(
            self._encode(prompt), sampling=fields, reuse=self._reuse(reuse)
        )
        return self._last_part(completion, len(completion.token_ids))

    def stream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]:
        completions = self._engine.stream(
            self._encode(prompt), sampling=fields, reuse=self._reuse(reuse)
        )

        def parts() -> Generator[Part, None, None]:
            tokens = 0
            for completion in completions:
                tokens += len(completion.token_ids)
                yield self._part(completion, tokens)

        return parts()

    async def astream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]:
        completions = self._engine.astream(
            self._encode(prompt), sampling=fields, reuse=self._reuse(reuse)
        )

        async def parts() -> AsyncGenerator[Part, None]:
            tokens = 0
            async for completion in completions:
                tokens += len(completion.token_ids)
                yield self._part(completion, tokens)

        return parts()

    def hint(self, texts: Sequence[str], *, namespace: str | None = None) -> None:
        """Nothing is done ahead yet."""

    def store_texts(
        self,
        documents: Iterable[tuple[str, Sequence[str]]],
        *,
        namespace: str | None = None,
        head: str = "",
        on_progress: OnProgress | None = None,
    ) -> PrecomputeResult:
        return precompute_texts(
            self._engine,
            documents,
            namespace=self._namespace(namespace),
            head=head,
            on_progress=on_progress,
        )

    def forget(self, sources: Iterable[str], *, namespace: str | None = None) -> int:
        store, model, where = self._store, self._engine.fingerprint, self._namespace(namespace)
        there = [name for name in sources if store.source(model, where, name) is not None]
        for name in there:
            store.remove_source(model, where, name)
        return len(there)

    def fingerprint(self) -> str:
        return self._engine.fingerprint

    def store_id(self) -> str:
        # With the last change: what was stored before may have gone since.
        return f"{self._store.root}#{self._namespace(None)}#{self._store.last_change()}"

    @property
    def _store(self) -> KVStore:
        if self._engine.store is None:
            raise OptionError("the engine was started without a store: give it one")
        return self._engine.store

    def _namespace(self, namespace: str | None) -> str:
        return self._engine.reuse.namespace if namespace is None else namespace

    def _encode(self, prompt: Prompt) -> str | Sequence[int]:
        """Messages as tokens: the template writes BOS itself, so it must not be added again."""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._engine.tokenizer
        text: str = tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True
        )
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _reuse(self, reuse: Mapping[str, Any]) -> ReuseOptions:
        return ReuseOptions.from_mapping(reuse, base=self._engine.reuse)

    def _part(self, completion: Completion, tokens: int) -> Part:
        if completion.finish_reason is None:
            return Part(completion.text)
        return self._last_part(completion, tokens)

    def _last_part(self, completion: Completion, tokens: int) -> Part:
        raw = {
            "model": self.model_name,
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": completion.prompt_tokens + tokens,
            },
            "ttft_ms": completion.ttft_ms,
            "latency_ms": completion.latency_ms,
        }
        return Part(completion.text, report=completion.report.to_mapping(), raw=raw)
