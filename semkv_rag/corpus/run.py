"""One precompute run: documents are compared with the store, and what is missing is computed.

A run goes on where a killed one stopped: index rows are committed while chunks complete, and a chunk file
that was written but not yet indexed is taken in by its header.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.corpus.capture import CaptureItem, Capturer, CaptureResult
from semkv_rag.corpus.context import PASSAGE, ContextMode, Contexts, context_modes, prefix_tokens
from semkv_rag.corpus.progress import (
    Failure,
    OnProgress,
    PrecomputeProgress,
    PrecomputeResult,
    ToCompute,
)
from semkv_rag.corpus.room import Room
from semkv_rag.corpus.split import tokenize
from semkv_rag.errors import CorpusError, OptionError, StoreLimitError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store import ChunkKey, ChunkRecord, chunk_id
from semkv_rag.unicode_text import is_unicode

# What a kill can lose is what came in since the last commit: keep both small.
_COMMIT_CHUNKS = 32
_COMMIT_SECONDS = 1.0

# The modes as digests have them: with other words, every stored source would be taken for changed.
_DIGESTED: dict[ContextMode, str] = {"prefix": "head", "left": "left"}


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    digest: str
    characters: int
    split: Callable[[Any], Sequence[str]]  # with the tokenizer: the chunks' texts
    empty: bool = False

    def chunks(self, tokenizer: Any) -> list[TokenArray]:
        """The tokens of its chunks, [tokens] each, without empty ones."""
        arrays = (tokenize(tokenizer, text) for text in self.split(tokenizer))
        return [tokens for tokens in arrays if tokens.size]


@dataclass(slots=True, eq=False)
class _Work:
    """A document on its way: what it consists of, and what is not computed yet."""

    document: Document
    ids: list[str]
    missing: set[str] = field(default_factory=set)
    failed: bool = False


class PrecomputeRun:
    """One run over some documents: first all are compared with the store, then the rest computed."""

    def __init__(
        self,
        engine: Capturer,
        namespace: str,
        prefix: str,
        context: Sequence[ContextMode],
        on_progress: OnProgress | None,
        max_bytes: int | None = None,
    ) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
            raise OptionError(f"max_bytes is {max_bytes!r}: use a number of bytes from 0 up")
        if engine.store is None:
            raise OptionError("the engine was started without a store: give it one")
        if not isinstance(prefix, str) or not is_unicode(prefix):
            raise OptionError(f"the prompt prefix is {prefix!a}: use a text")
        self.result = PrecomputeResult()
        self._modes = context_modes(context)
        self._engine = engine
        self._model = engine.fingerprint
        self._store = engine.store
        self._namespace = check_namespace(namespace)
        self._prefix = prefix
        self._on_progress = on_progress
        self._room = Room(self._store, self._namespace, max_bytes)
        self._entered_tokens = 0  # of chunks that are on their way, or are written
        self._pending: deque[Document] = deque()
        self._waiting: dict[str, list[_Work]] = {}  # chunk id -> the documents it belongs to
        self._written: list[ChunkKey] = []  # not in the index yet
        self._complete: deque[_Work] = deque()  # all chunks written, not in the index yet
        self._retried: set[str] = set()
        self._committed_at = time.monotonic()
        self._documents_to_do = 0
        self._characters_to_do = 0
        self._characters_done = 0.0

    @property
    def settings(self) -> tuple[object, ...]:
        """What decides on a source's chunks beside its own text; part of its digest."""
        return self._model, self._prefix, tuple(_DIGESTED[mode] for mode in self._modes)

    @property
    def pending(self) -> tuple[str, ...]:
        """The names of the documents that are new or changed and not on their way yet."""
        return tuple(document.name for document in self._pending)

    def read(self, sources: Sequence[tuple[str, Callable[[], Document]]]) -> None:
        """Read each source (its name, what reads it) and find those that are new or changed."""
        self.result.documents = len(sources)
        for number, (name, read) in enumerate(sources, 1):
            try:
                document = read()
            except CorpusError as error:
                self.result.failures.append(Failure(name, str(error)))
            else:
                if document.empty:
                    self.result.empty += (name,)
                if self._is_stored(document):
                    self.result.unchanged += 1
                else:
                    self._pending.append(document)
            if self._on_progress:
                share = number / len(sources)
                self._on_progress(PrecomputeProgress("reading", number, len(sources), share))

    def _is_stored(self, document: Document) -> bool:
        source = self._store.source(self._model, self._namespace, document.name)
        # Chunks may have been evicted since.
        if source is None or source.digest != document.digest:
            return False
        there = self._stored(source.chunk_ids)
        if there.keys() != set(source.chunk_ids):
            return False
        self._room.keep(there.values())
        return True

    def compute(self) -> None:
        """Compute what is missing. Whatever ends it, what was computed is kept."""
        self._documents_to_do = len(self._pending)
        self._characters_to_do = sum(document.characters for document in self._pending)
        self._room.begin()
        if not self._pending:
            return
        tokenizer = self._engine.tokenizer  # the first thing that needs a running engine
        started = time.monotonic()
        contexts = self._contexts(tokenizer)
        while self._pending:
            try:
                for result in self._engine.capture(self._items(tokenizer, contexts)):
                    self._book(result)
            finally:
                self._commit()
        self._report_progress()
        self.result.computing_seconds = time.monotonic() - started

    def count(self) -> ToCompute:
        """What `compute` would do."""
        documents = len(self._pending)
        if not documents:
            return ToCompute(0, 0, 0, 0)
        tokenizer = self._engine.tokenizer
        contexts = self._contexts(tokenizer)
        seen: set[str] = set()
        chunks = tokens = 0
        while self._pending:
            items = self._items_of(self._pending.popleft(), tokenizer, contexts)
            by_id = {item.id: item for item in items if item.id not in seen}
            seen |= by_id.keys()
            missing = by_id.keys() - self._stored(by_id).keys()
            chunks += len(missing)
            tokens += sum(len(by_id[id_].tokens) for id_ in missing)
        return ToCompute(documents, chunks, tokens, tokens * self._engine.kv_bytes_per_token)

    def remove_gone(self, folders: Iterable[str], found: set[str]) -> None:
        """Remove the sources whose name starts with one of `folders` and is not `found`."""
        prefixes = tuple(folders)
        for source in self._store.sources(self._model, self._namespace):
            if source.name.startswith(prefixes) and source.name not in found:
                self._store.remove_source(self._model, self._namespace, source.name)
                self.result.removed += 1

    def _items(self, tokenizer: Any, contexts: Contexts) -> Iterator[CaptureItem]:
        """What the pending documents lack, found out only as the engine gets to it."""
        while self._pending:
            document = self._pending.popleft()
            yield from self._enter(document, self._items_of(document, tokenizer, contexts))
            self._commit_when_due()
            self._report_progress()

    def _items_of(
        self, document: Document, tokenizer: Any, contexts: Contexts
    ) -> Sequence[CaptureItem]:
        """All that a document consists of."""
        variants = contexts.variants(document.chunks(tokenizer))
        chunks = [
            self._item("document", one.tokens, one.context, one.reference) for one in variants
        ]
        if not chunks or not tokenize(tokenizer, self._prefix).size:
            return chunks
        # The prefix belongs to every document behind it, and so goes with the last of them. Its kind
        # is `head` (`semkv_rag.store.files.header.KINDS`).
        return [self._item("head", contexts.prefix, token_array([])), *chunks]

    def _contexts(self, tokenizer: Any) -> Contexts:
        # vLLM takes a prompt that leaves room for one token of an answer.
        longest = self._engine.max_model_len - 1
        prefix, passage = prefix_tokens(tokenizer, self._prefix), tokenize(tokenizer, PASSAGE)
        return Contexts(self._modes, prefix, passage, longest)

    def _item(
        self,
        kind: str,
        tokens: TokenArray,
        context: TokenArray,
        reference: TokenArray | None = None,
    ) -> CaptureItem:
        id_ = chunk_id(self._model, self._namespace, context, tokens)
        return CaptureItem(id_, self._namespace, kind, tokens, context, reference)

    def _enter(self, document: Document, items: Sequence[CaptureItem]) -> list[CaptureItem]:
        """Set a document on its way; returns its chunks that nobody has or is computing."""
        by_id = {item.id: item for item in items}
        self._adopt(by_id.keys() - self._stored(by_id).keys())
        there = self._stored(by_id)
        self._room.keep(there.values())
        present = set(there)
        work = _Work(document, list(by_id), missing=set(by_id) - present)
        new = [item for id_, item in by_id.items() if id_ in work.missing - self._waiting.keys()]
        tokens = sum(len(item.tokens) for item in new)
        if (fault := self._too_much(tokens)) is not None:
            self.result.failures.append(Failure(document.name, fault))
            self._characters_done += document.characters
            return []
        self._entered_tokens += tokens
        self._room.computing(item.id for item in new)
        for id_ in work.missing:
            self._waiting.setdefault(id_, []).append(work)
        if not work.missing:
            self._complete.append(work)
        documents = sum(item.kind == "document" for item in by_id.values())
        self.result.chunks_reused += documents - sum(item.kind == "document" for item in new)
        self._characters_done += document.characters * (len(present) / len(by_id) if by_id else 1)
        return new

    def _too_much(self, tokens: int) -> str | None:
        """Why so many more cannot be stored, or None."""
        if not tokens:
            return None
        rate = self._engine.kv_bytes_per_token
        if self.result.tokens:  # with the files' headers
            rate = max(rate, -(-self.result.bytes // self.result.tokens))
        return self._room.fault(tokens * rate, self._entered_tokens * rate)

    def _stored(self, ids: Iterable[str]) -> dict[str, ChunkRecord]:
        return self._store.get(self._model, self._namespace, ids, patient=True)

    def _adopt(self, ids: Iterable[str]) -> None:
        """Take in those of `ids` that a killed run wrote and did not come to index."""
        keys = map(self._key, ids)
        written = [
            key for key in keys if self._store.path(key.model, key.namespace, key.id).exists()
        ]
        if written:
            with suppress(StoreLimitError):  # they are computed again, if there is room
                self._store.add(written)

    def _key(self, id_: str) -> ChunkKey:
        return ChunkKey(id_, self._model, self._namespace)

    def _book(self, result: CaptureResult) -> None:
        """Book one captured chunk on every document that waits for it."""
        item = result.item
        if result.error is None:
            self._written.append(self._key(item.id))
            self.result.chunks_captured += 1
            self.result.tokens += len(item.tokens)
            self.result.bytes += result.bytes
        for work in self._waiting.pop(item.id):
            self._characters_done += work.document.characters / len(work.ids)
            work.missing.discard(item.id)
            if result.error is not None and not work.failed:
                work.failed = True
                self.result.failures.append(Failure(work.document.name, result.error))
            if not work.missing and not work.failed:
                self._complete.append(work)
        self._commit_when_due()
        self._report_progress()

    def _commit_when_due(self) -> None:
        late = time.monotonic() - self._committed_at > _COMMIT_SECONDS
        if late or len(self._written) >= _COMMIT_CHUNKS:
            self._commit()

    def _commit(self) -> None:
        """Put into the index what is on disk, and the sources that are whole."""
        refused: str | None = None
        if self._written:
            try:
                # Documents come in parts, between which others may be used.
                works = [*self._complete, *(w for own in self._waiting.values() for w in own)]
                kept = {id_ for work in works for id_ in work.ids}
                self._store.add(self._written, kept=kept)
            except StoreLimitError as error:  # others pinned or added meanwhile
                refused = str(error)
            self._written.clear()
        while self._complete:
            work = self._complete.popleft()
            name, digest, whole = work.document.name, work.document.digest, set(work.ids)
            if there := self._stored(work.ids).keys() == whole:
                self._store.put_source(self._model, self._namespace, name, digest, work.ids)
                # What is listed stays. Another process may have given a chunk up just before.
                there = self._stored(work.ids).keys() == whole
            if there:
                self.result.changed += 1
            elif refused is None and name not in self._retried:
                # Another source gave up a chunk that was there when this one was looked at.
                self._retried.add(name)
                self._pending.append(work.document)
            else:
                fault = refused or "its chunks do not stay in the store"
                self.result.failures.append(Failure(name, fault))
        self._committed_at = time.monotonic()

    def _report_progress(self) -> None:
        if self._on_progress:
            result, characters = self.result, max(1, self._characters_to_do)
            self._on_progress(
                PrecomputeProgress(
                    phase="computing",
                    documents=result.changed,
                    documents_total=self._documents_to_do,
                    share=min(1.0, self._characters_done / characters),
                    chunks=result.chunks_captured,
                    tokens=result.tokens,
                    bytes=result.bytes,
                )
            )


def digest_of(*parts: object) -> str:
    """A digest of everything that decides a source's chunks; `parts` are numbers and strings."""
    return blake3(repr(parts).encode()).hexdigest()
