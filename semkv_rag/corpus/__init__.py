"""Documents to stored KV, offline: read, split, and run through the model once."""

from semkv_rag.corpus.capture import CaptureItem, Capturer, CaptureResult
from semkv_rag.corpus.context import CONTEXT_MODES, DEFAULT_CONTEXT, ContextMode, prefix_tokens
from semkv_rag.corpus.lazy import LazyCapturer
from semkv_rag.corpus.precompute import DEFAULT_CHUNK_TOKENS, precompute, precompute_texts
from semkv_rag.corpus.progress import Failure, OnProgress, PrecomputeProgress, PrecomputeResult
from semkv_rag.corpus.readers import (
    DocumentFile,
    FoundFiles,
    find_files,
    is_markdown,
    read_document,
)
from semkv_rag.corpus.sources import forget_sources
from semkv_rag.corpus.split import TextChunk, split_text

__all__ = [
    "CONTEXT_MODES",
    "DEFAULT_CHUNK_TOKENS",
    "DEFAULT_CONTEXT",
    "CaptureItem",
    "CaptureResult",
    "Capturer",
    "ContextMode",
    "DocumentFile",
    "Failure",
    "FoundFiles",
    "LazyCapturer",
    "OnProgress",
    "PrecomputeProgress",
    "PrecomputeResult",
    "TextChunk",
    "find_files",
    "forget_sources",
    "is_markdown",
    "precompute",
    "precompute_texts",
    "prefix_tokens",
    "read_document",
    "split_text",
]
