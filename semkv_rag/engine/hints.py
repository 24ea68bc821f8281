"""Hints: texts that were retrieved are made ready while the prompt is still being built.

Nothing has to be wired for reuse; the matcher finds stored chunks in any prompt. A hint only makes it
come sooner or cover more: the files of chunks in the text are read into the page cache, and, where it
was switched on, a text that holds no stored chunk is stored for the next time. All of it happens in one
background thread, behind the caller's back and behind the requests': a text is only computed while no
request is under way, and dropped where one arrives.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_rag.config import check_namespace
from semkv_rag.connector.catalogue import Catalogue
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.corpus.context import PASSAGE, Contexts, head_tokens
from semkv_rag.corpus.split import tokenize
from semkv_rag.errors import SemKVError, StoreError
from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.store import ChunkKey, chunk_id
from semkv_rag.store.files.beneath import open_file

if TYPE_CHECKING:
    from semkv_rag.engine.client import ReportingLLM
    from semkv_rag.engine.llm_capturer import LLMCapturer

logger = logging.getLogger(__name__)

HINTS_WAITING = 256
"""Hints beyond it are dropped: nobody waits for old ones."""

TEXTS_WAITING = 1024
"""Texts to be stored beyond it push out the oldest."""

QUIET_SECONDS = 1.0
"""A hint comes just before its request: so long nothing may be under way before a text is computed."""

POLL_SECONDS = 0.1
LOOK_UP_SECONDS = 60.0
"""Nobody waits for a hint."""
_NO_POOL = "cannot schedule new futures after"
"""What thread pools say when they are closed, or Python ends."""
MIN_TOKENS = 16
"""Shorter texts are cheaper to compute than to look up."""


@dataclass(frozen=True, slots=True)
class _Hint:
    texts: tuple[str, ...]
    namespace: str


class Hints:
    """One per engine. The thread starts with the first hint.

    Args:
        llm: told to be quiet or not.
        capturer: of the same engine.
        store_retrieved: of one hint's texts, how many are stored at most.
    """

    def __init__(self, llm: ReportingLLM, capturer: LLMCapturer, store_retrieved: int) -> None:
        self._llm = llm
        self._capturer = capturer
        self._store_retrieved = store_retrieved
        self._queue: queue.Queue[_Hint] = queue.Queue(HINTS_WAITING)
        self._unstored: deque[CaptureItem] = deque(maxlen=TEXTS_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def give(self, texts: Sequence[str], namespace: str) -> None:
        """Take a hint; returns at once and never raises."""
        with suppress(queue.Full):
            self._queue.put_nowait(_Hint(tuple(texts), namespace))
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="semkv-hints", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop; what was not done yet is dropped."""
        with self._lock:
            self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        catalogue = Catalogue(self._capturer.store, self._capturer.fingerprint)
        try:
            while not self._closed.is_set():
                try:
                    with suppress(queue.Empty):
                        self._take(self._queue.get(timeout=POLL_SECONDS), catalogue)
                    if self._unstored and self._is_quiet():
                        self._store(self._unstored.popleft())
                except SemKVError as error:
                    logger.info("semkv: a hint was not followed: %s", error)
                except Exception as error:
                    if isinstance(error, RuntimeError) and _NO_POOL in str(error):
                        return  # a script ends that closes nothing
                    logger.exception("A hint was not followed")
        finally:
            with suppress(SemKVError):
                catalogue.close()

    def _take(self, hint: _Hint, catalogue: Catalogue) -> None:
        room = self._store_retrieved
        check_namespace(hint.namespace)
        for text in hint.texts:
            tokens = tokenize(self._capturer.tokenizer, text)
            if len(tokens) < MIN_TOKENS:
                continue
            look_up = catalogue.find(hint.namespace, tokens)
            wait([look_up], LOOK_UP_SECONDS)
            if not look_up.done():
                raise StoreError("the store's index does not answer")
            spans = look_up.result()
            catalogue.used(spans)
            self._read_ahead(hint.namespace, {span.chunk_id for span in spans})
            # A heading that many texts share does not make this one a stored one.
            if room and 2 * sum(span.length for span in spans) < len(tokens):
                room -= 1
                item = self._item(hint.namespace, tokens)
                id_ = item.id
                if all(other.id != id_ for other in self._unstored):
                    self._unstored.append(item)

    def _item(self, namespace: str, tokens: TokenArray) -> CaptureItem:
        """A text to be stored: nobody knows its document, so it stands behind an unrelated passage."""
        capturer = self._capturer
        head, passage = head_tokens(capturer.tokenizer), tokenize(capturer.tokenizer, PASSAGE)
        contexts = Contexts(("left",), head, passage, capturer.max_model_len - 1)
        (one,) = contexts.variants([tokens])
        id_ = chunk_id(capturer.fingerprint, namespace, one.context, tokens)
        return CaptureItem(id_, namespace, "document", tokens, one.context, one.reference)

    def _read_ahead(self, namespace: str, ids: set[str]) -> None:
        if not ids or not hasattr(os, "posix_fadvise"):
            return
        store, model = self._capturer.store, self._capturer.fingerprint
        for record in store.get(model, namespace, ids).values():
            for rank in range(record.ranks):
                with suppress(OSError):  # evicted meanwhile
                    file = open_file(store.path(model, namespace, record.id, rank))
                    try:
                        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                    finally:
                        os.close(file)

    def _is_quiet(self) -> bool:
        quiet = time.monotonic() - self._llm.quiet_since
        return self._queue.empty() and self._llm.active == 0 and quiet > QUIET_SECONDS

    def _store(self, item: CaptureItem) -> None:
        def abandon() -> bool:
            return self._closed.is_set() or self._llm.active > 0

        store, model = self._capturer.store, self._capturer.fingerprint
        if store.get(model, item.namespace, [item.id]):
            return
        for result in self._capturer.capture([item], abandon=abandon):
            if result.error is None:
                store.add([ChunkKey(item.id, model, item.namespace)])
            else:
                logger.info("semkv: a retrieved text was not stored: %s", result.error)
            return
        self._unstored.append(item)  # a request came: later
