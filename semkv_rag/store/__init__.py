"""The KV store: one safetensors file per chunk and rank or per image, and an SQL index over them.

Usable without vLLM. `KVStore` is the store, `write_chunk` and `ChunkFile` write and read a chunk's
file; docs/store.md specifies the files and the tables.
"""

from semkv_rag.store.files.chunk_file import ChunkFile, write_chunk
from semkv_rag.store.files.header import KINDS, ChunkHeader, chunk_id
from semkv_rag.store.files.state_file import StateFile, state_id
from semkv_rag.store.kv_store import KVStore
from semkv_rag.store.lifecycle import Lifecycle
from semkv_rag.store.place import ObjectPlace, StorePlace, place_of
from semkv_rag.store.prompts import StoredPrompts
from semkv_rag.store.records import (
    Change,
    Changes,
    ChunkKey,
    ChunkRecord,
    Collected,
    Limit,
    ModelInfo,
    NamespaceStats,
    Pin,
    Problem,
    PromptRecord,
    RecodeReport,
    SourceInfo,
    StateRecord,
    StoredOutcome,
    Taken,
    VectorChanges,
    VectorKey,
    VerifyReport,
)
from semkv_rag.store.states import StoredStates

__all__ = [
    "KINDS",
    "Change",
    "Changes",
    "ChunkFile",
    "ChunkHeader",
    "ChunkKey",
    "ChunkRecord",
    "Collected",
    "KVStore",
    "Lifecycle",
    "Limit",
    "ModelInfo",
    "NamespaceStats",
    "ObjectPlace",
    "Pin",
    "Problem",
    "PromptRecord",
    "RecodeReport",
    "SourceInfo",
    "StateFile",
    "StateRecord",
    "StorePlace",
    "StoredOutcome",
    "StoredPrompts",
    "StoredStates",
    "Taken",
    "VectorChanges",
    "VectorKey",
    "VerifyReport",
    "chunk_id",
    "place_of",
    "state_id",
    "write_chunk",
]
