"""Prompts into the tiers, ahead of any request: prefilled once, stored, and made donors.

A prompt that is stored already costs nothing. A prompt counts as stored only when all of it is in the
store. So a run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from semkv_rag.corpus.capture import CaptureItem, Capturer
from semkv_rag.corpus.progress import Failure, OnProgress, PrecomputeProgress
from semkv_rag.errors import OptionError, StoreLimitError
from semkv_rag.prompt_cache import Cascade
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store import ChunkKey, KVStore, chunk_id
from semkv_rag.unicode_text import is_unicode, not_unicode

IN_FLIGHT = 32


@dataclass(frozen=True, slots=True, eq=False)
class WarmPrompt:
    """A prompt to be stored.

    Attributes:
        name: where it is from, for people.
        text: the prompt's, as requests bring it.
        tokens: the prompt's, [tokens].
        namespace: the tenant it belongs to.
        source_version: only requests with the same one may use it.
    """

    name: str
    text: str
    tokens: TokenArray
    namespace: str
    source_version: str = ""


@dataclass(slots=True)
class WarmResult:
    """What a run found and did.

    Attributes:
        prompts: that were given.
        stored: of them, those that are donors now and were not before.
        present: of them, those that were there already.
        computed: of the stored ones, those whose KV was computed.
        tokens: tokens of the computed prompts.
        bytes: their files' bytes.
        failures: prompts that were not stored.
        computing_seconds: wall time of computing, without the engine's start.
    """

    prompts: int = 0
    stored: int = 0
    present: int = 0
    computed: int = 0
    tokens: int = 0
    bytes: int = 0
    failures: list[Failure] = field(default_factory=list)
    computing_seconds: float = 0.0


def warm(
    engine: Capturer,
    cascade: Cascade,
    prompts: Sequence[WarmPrompt],
    *,
    max_tokens: int,
    on_progress: OnProgress | None = None,
) -> WarmResult:
    """Store prompts and make them donors.

    Args:
        engine: computes them; a `LazyCapturer` starts it only when there are any.
        cascade: of the same store and model.
        prompts: of any number; those of the same tokens are one.
        max_tokens: the model's context window; a prompt leaves one token for the answer.
        on_progress: called as the run goes on.

    Raises:
        EngineError: the model cannot be served with reuse, or the engine stopped.
        StoreError: the store cannot be written. What was stored before is kept.
    """
    if engine.store is None:
        raise OptionError("the engine was started without a store: give it one")
    return _Run(engine, engine.store, cascade, max_tokens, on_progress).over(prompts)


class _Run:
    def __init__(
        self,
        engine: Capturer,
        store: KVStore,
        cascade: Cascade,
        max_tokens: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._model = engine.fingerprint
        self._cascade = cascade
        self._max_tokens = max_tokens
        self._on_progress = on_progress
        self._result = WarmResult()
        self._started = 0.0

    def over(self, prompts: Sequence[WarmPrompt]) -> WarmResult:
        result = self._result
        result.prompts = len(prompts)
        missing: dict[str, WarmPrompt] = {}
        for number, prompt in enumerate(prompts, 1):
            self._sort(prompt, missing)
            share = number / len(prompts)
            self._report_progress(PrecomputeProgress("reading", number, len(prompts), share))
        if missing:
            self._compute(missing)
        return result

    def _sort(self, prompt: WarmPrompt, missing: dict[str, WarmPrompt]) -> None:
        """Find out what there is to do for a prompt, and do it unless it takes the engine."""
        id_ = chunk_id(self._model, prompt.namespace, token_array([]), prompt.tokens)
        if not len(prompt.tokens):
            self._fail(prompt, "no tokens")
        elif not is_unicode(prompt.text):
            self._fail(prompt, not_unicode(prompt.text))
        elif len(prompt.tokens) >= self._max_tokens:
            self._fail(
                prompt, f"{len(prompt.tokens):,} tokens, and the model takes {self._max_tokens:,}"
            )
        elif id_ in missing or self._is_there(prompt):
            self._result.present += 1
        elif self._has_kv(prompt, id_):
            self._observe(prompt)
        else:
            missing[id_] = prompt

    def _is_there(self, prompt: WarmPrompt) -> bool:
        return self._cascade.knows(
            prompt.text, prompt.tokens, prompt.namespace, source_version=prompt.source_version
        )

    def _has_kv(self, prompt: WarmPrompt, id_: str) -> bool:
        """Whether the KV is stored, or was written by a run that was killed before it said so."""
        if self._store.get(self._model, prompt.namespace, [id_], patient=True):
            return True
        if not self._store.path(self._model, prompt.namespace, id_).exists():
            return False
        try:
            return bool(self._store.add([ChunkKey(id_, self._model, prompt.namespace)]))
        except StoreLimitError:  # it is computed again, if there is room
            return False

    def _add(self, prompt: WarmPrompt, id_: str) -> str | None:
        """Promise a prompt's KV; why that cannot be, or None."""
        try:
            self._store.add([ChunkKey(id_, self._model, prompt.namespace)])
        except StoreLimitError as error:
            return str(error)
        return None

    def _compute(self, missing: dict[str, WarmPrompt]) -> None:
        result, done = self._result, 0
        to_do = sum(len(prompt.tokens) for prompt in missing.values())
        for captured in self._engine.capture(self._items(missing), in_flight=IN_FLIGHT):
            prompt = missing[captured.item.id]
            done += len(prompt.tokens)
            fault = captured.error or self._add(prompt, captured.item.id)
            if fault is not None:
                self._fail(prompt, fault)
            else:
                self._observe(prompt)
                result.computed += 1
                result.tokens += len(prompt.tokens)
                result.bytes += captured.bytes
            self._report_progress(
                PrecomputeProgress(
                    phase="computing",
                    documents=result.computed,
                    documents_total=len(missing),
                    share=done / to_do,
                    chunks=result.computed,
                    tokens=result.tokens,
                    bytes=result.bytes,
                )
            )
        result.computing_seconds = time.monotonic() - self._started

    def _items(self, missing: dict[str, WarmPrompt]) -> Iterator[CaptureItem]:
        self._started = time.monotonic()  # the first is asked for once the engine runs
        for id_, prompt in missing.items():
            yield CaptureItem(id_, prompt.namespace, "prompt", prompt.tokens, token_array([]))

    def _observe(self, prompt: WarmPrompt) -> None:
        """Make a prompt whose KV is stored a donor."""
        try:
            stored = self._cascade.observe(
                prompt.text, prompt.tokens, prompt.namespace, source_version=prompt.source_version
            )
        except ValueError as error:
            self._fail(prompt, str(error))
            return
        if stored:
            self._result.stored += 1
        else:
            self._fail(prompt, "its KV does not stay in the store")

    def _fail(self, prompt: WarmPrompt, reason: str) -> None:
        self._result.failures.append(Failure(prompt.name, reason))

    def _report_progress(self, progress: PrecomputeProgress) -> None:
        if self._on_progress:
            self._on_progress(progress)
