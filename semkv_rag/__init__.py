"""Precomputed KV caches for RAG on vLLM: a document is prefilled once, and never again.

`semkv_rag.corpus` precomputes documents, `semkv_rag.store` keeps their KV, `semkv_rag.engine` answers
with it; `semkv_rag.reuse` and `semkv_rag.blend` are the matching and the arithmetic in between. Only
`Engine` needs vLLM, and imports it when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import (
    ChunkFileError,
    CorpusError,
    EngineError,
    MissingExtraError,
    OptionError,
    SemKVError,
    StoreError,
    StoreVersionError,
)
from semkv_rag.report import ReuseReport

if TYPE_CHECKING:
    from semkv_rag.engine import Engine

__all__ = [
    "ChunkFileError",
    "CorpusError",
    "Engine",
    "EngineError",
    "MissingExtraError",
    "OptionError",
    "ReuseOptions",
    "ReuseReport",
    "SemKVError",
    "StoreError",
    "StoreVersionError",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from semkv_rag.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
