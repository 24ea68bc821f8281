"""Precompute: documents are split, run through the model once, and their KV kept.

Offline, once per change of the documents: by `semkv precompute`, and by the frameworks' ingestion
through `precompute_texts`. A run goes on where a killed one stopped: index rows are committed while
chunks complete, and a chunk file that was written but not yet indexed is taken in by its header.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus.capture import Capturer
from semkv_rag.corpus.context import (
    DEFAULT_CONTEXT,
    ContextMode,
)
from semkv_rag.corpus.document_text import read_text
from semkv_rag.corpus.progress import (
    OnProgress,
    PrecomputeResult,
)
from semkv_rag.corpus.readers import DocumentFile, find_files
from semkv_rag.corpus.run import Document, PrecomputeRun, digest_of
from semkv_rag.corpus.split import check_sizes
from semkv_rag.errors import CorpusError, OptionError
from semkv_rag.unicode_text import is_unicode, not_unicode

DEFAULT_CHUNK_TOKENS = 512


def precompute(
    engine: Capturer,
    paths: Iterable[str | Path],
    *,
    namespace: str = DEFAULT_NAMESPACE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    overlap: int = 0,
    prefix: str = "",
    context: Sequence[ContextMode] = DEFAULT_CONTEXT,
    sync: bool = False,
    max_bytes: int | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> PrecomputeResult:
    """Store the KV of the documents under `paths`; what is in the store already costs nothing.

    A document whose text, chunking, prefix and contexts are those of the last run is left alone. Of a
    changed one just the new chunks are computed, and the chunks it no longer has are removed.

    Args:
        engine: computes the chunks; a `LazyCapturer` starts it only when there are any.
        paths: files and folders.
        namespace: the tenant the documents belong to.
        chunk_tokens: the most tokens of a chunk.
        overlap: the most tokens a chunk shares with the one before it.
        prefix: the text every prompt will start with. All chunks are computed behind its tokens, and
            it is stored itself, so that the prefix and the chunk that follows it need no recompute.
            Empty: behind what the tokenizer puts before every prompt (BOS), else a neutral token.
        context: what stands to a chunk's left, each mode a variant of its own: `prefix`, or `left`
            (the prefix and its document up to the chunk, at most 2,048 tokens of it; for a document's
            first chunk the prefix and an unrelated passage).
        sync: remove the sources of the given folders whose files are gone.
        max_bytes: documents whose chunks would make the store larger are left out, each with a failure
            that says so.
        dry_run: compute and remove nothing; the result's `to_compute` says what a run would.
        on_progress: called as the run goes on.

    Raises:
        CorpusError: a path does not exist or is of no known kind. A document that cannot be read
            is no error: it is in the result's `failures`.
        OptionError: the chunking, the contexts, the namespace or the prefix make no sense, or the engine
            has no store.
        StoreError: the store cannot be written. What was computed before is kept.
    """
    started = time.monotonic()
    check_sizes(chunk_tokens, overlap)
    run = PrecomputeRun(engine, namespace, prefix, context, on_progress, max_bytes)
    found = find_files(map(Path, paths))

    def read(file: DocumentFile) -> Document:
        return read_text(file).document(run.settings, chunk_tokens, overlap)

    run.read([(file.name, partial(read, file)) for file in found.documents])
    if dry_run:
        run.result.to_compute = run.count()
    else:
        run.compute()
    if sync and not dry_run:
        run.remove_gone(found.folders, {file.name for file in found.documents})
    run.result.skipped = found.skipped
    run.result.seconds = time.monotonic() - started
    return run.result


def precompute_texts(
    engine: Capturer,
    documents: Iterable[tuple[str, Sequence[str]]],
    *,
    namespace: str = DEFAULT_NAMESPACE,
    prefix: str = "",
    context: Sequence[ContextMode] = DEFAULT_CONTEXT,
    on_progress: OnProgress | None = None,
) -> PrecomputeResult:
    """Store the KV of texts that are cut already, given as (source name, its chunks' texts).

    For what is not a file, and for frameworks that split documents themselves. All else is as in
    `precompute`: a source whose texts, prefix and contexts are those of the last call is left alone. Give
    the texts of a source in its order: with `left` each is computed behind the one before.

    Raises:
        OptionError: the contexts, the namespace or the prefix make no sense, a document is no name with
            texts, or the engine has no store. Nothing was computed. A text that cannot be encoded is
            no error: its document is in the result's `failures`.
        StoreError: the store cannot be written. What was computed before is kept.
    """
    started = time.monotonic()
    run = PrecomputeRun(engine, namespace, prefix, context, on_progress)
    checked = [(_name(name), _texts(name, texts)) for name, texts in documents]

    def read(name: str, texts: Sequence[str]) -> Document:
        for number, text in enumerate(texts, 1):
            if not is_unicode(text):
                raise CorpusError(f"chunk {number}: {not_unicode(text)}")
        digest = digest_of(*run.settings, *texts)
        empty = not any(text.strip() for text in texts)
        return Document(name, digest, sum(map(len, texts)), lambda _: texts, empty=empty)

    run.read([(name, partial(read, name, texts)) for name, texts in checked])
    run.compute()
    run.result.seconds = time.monotonic() - started
    return run.result


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_unicode(name):
        raise OptionError(f"a document is called {name!a}: use a text")
    return name


def _texts(name: str, texts: object) -> Sequence[str]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise OptionError(f"{name}: give the texts of its chunks in a list")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise OptionError(f"{name}: a chunk is {wrong[0]!a}: use a text")
    return texts
