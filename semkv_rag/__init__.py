"""Precomputed KV caches for RAG on vLLM: a document is prefilled once, and never again.

What users need is here: `Engine` answers, `precompute` stores documents in a `KVStore`, `ReuseOptions`
and `PromptCacheOptions` say how stored KV is reused, `ReuseReport` what came of it. A selector of your
own is a `semkv_rag.blend.Selector`. What is heavy is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import (
    ChunkFileError,
    CorpusError,
    EngineError,
    MissingExtraError,
    ObjectStoreError,
    OptionError,
    SemKVError,
    StateFileError,
    StoreError,
    StoreLimitError,
    StoreVersionError,
)
from semkv_rag.report import ReuseReport

if TYPE_CHECKING:
    from semkv_rag.corpus import PrecomputeResult, precompute
    from semkv_rag.engine import Completion, Engine
    from semkv_rag.prompt_cache import PromptCacheOptions
    from semkv_rag.store import KVStore

__all__ = [
    "ChunkFileError",
    "Completion",
    "CorpusError",
    "Engine",
    "EngineError",
    "KVStore",
    "MissingExtraError",
    "ObjectStoreError",
    "OptionError",
    "PrecomputeResult",
    "PromptCacheOptions",
    "ReuseOptions",
    "ReuseReport",
    "SemKVError",
    "StateFileError",
    "StoreError",
    "StoreLimitError",
    "StoreVersionError",
    "precompute",
]

_LATER = {
    "Completion": "semkv_rag.engine",
    "Engine": "semkv_rag.engine",
    "KVStore": "semkv_rag.store",
    "PrecomputeResult": "semkv_rag.corpus",
    "PromptCacheOptions": "semkv_rag.prompt_cache",
    "precompute": "semkv_rag.corpus",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
