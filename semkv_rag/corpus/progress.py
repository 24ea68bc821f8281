"""How far a precompute run is: what it tells whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Failure:
    """A document that was not stored, and why, in words."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrecomputeProgress:
    """How far a run is.

    Attributes:
        phase: `reading` while documents are read and compared with the store, then `computing`.
        documents: documents read, or documents done.
        documents_total: documents to be read, or documents that are new or changed.
        share: of the phase's work that is done, by characters while computing, 0 to 1.
        chunks: chunks whose KV was computed in this run.
        tokens: their tokens.
        bytes: their files' bytes.
    """

    phase: Literal["reading", "computing"]
    documents: int
    documents_total: int
    share: float
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ToCompute:
    """What a run would compute.

    Attributes:
        documents: those that are new or changed.
        chunks: their chunks that are not in the store, each variant of a chunk counted.
        tokens: of these chunks.
        bytes: of their KV, without the files' headers.
    """

    documents: int
    chunks: int
    tokens: int
    bytes: int


@dataclass(slots=True)
class PrecomputeResult:
    """What a run found and did.

    Attributes:
        documents: documents found.
        unchanged: documents whose chunks were all in the store.
        changed: documents that are new or changed, and stored now.
        removed: sources that went because their file is gone.
        chunks_captured: chunks whose KV was computed.
        chunks_reused: chunks of changed documents that were in the store.
        tokens: tokens of the captured chunks.
        bytes: their files' bytes.
        to_compute: documents, chunks, tokens and about how many bytes are not in the store yet; only of
            a dry run, which computes none of it.
        failures: documents that could not be read or stored whole.
        skipped: files in the folders that no reader is for.
        empty: documents without any text; they are sources without chunks.
        seconds: wall time of the run.
        computing_seconds: of it, splitting and computing, without the engine's start.
    """

    documents: int = 0
    unchanged: int = 0
    changed: int = 0
    removed: int = 0
    chunks_captured: int = 0
    chunks_reused: int = 0
    tokens: int = 0
    bytes: int = 0
    to_compute: ToCompute | None = None
    failures: list[Failure] = field(default_factory=list)
    skipped: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    seconds: float = 0.0
    computing_seconds: float = 0.0


OnProgress: TypeAlias = Callable[[PrecomputeProgress], None]
"""Called in the caller's thread after every document read and every chunk computed."""
