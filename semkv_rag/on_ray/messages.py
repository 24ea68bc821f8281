"""What the driver and the engines say to each other, as rows of a Ray dataset: JSON, nothing pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from semkv_rag import errors
from semkv_rag.corpus.context import ContextMode
from semkv_rag.corpus.document_text import DocumentText
from semkv_rag.corpus.progress import Failure, PrecomputeResult

PARCEL = "parcel"
OUTCOME = "outcome"

PARCEL_CHARACTERS = 32768
"""So much text goes to an engine at a time: enough to fill its batches, and little to do again."""
PARCELS_OF_AN_ENGINE = 4
"""Each engine gets no fewer, of smaller corpora too: so that all end at about the same time."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all engines of a run are told.

    Attributes:
        place: where the store is, as `StorePlace.to_mapping` gives it; `store_id` is a folder's own name,
            so that an engine which sees another folder in its place finds out; None of an object store.
        index_url: the store's index; None for SQLite in the folder.
        codec: by which chunks are stored.
        lora: an adapter's name and folder; None for the model alone.
        fingerprint: of the model, or of it with the adapter, as the driver took it when it compared
            documents with the store.
        driver_node: Ray's id of the machine that the driver is on.
        cpus: of an engine, as Ray counts them.
        engine_args: fields of vLLM's `AsyncEngineArgs`.
    """

    model: str
    place: dict[str, Any]
    store_id: str | None
    index_url: str | None
    codec: str
    lora: tuple[str, str] | None
    fingerprint: str
    namespace: str
    prefix: str
    context: tuple[ContextMode, ...]
    chunk_tokens: int
    overlap: int
    driver_node: str
    cpus: float
    engine_args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an engine made of a parcel.

    Attributes:
        names: of the parcel's documents.
        result: counts and failures; of documents that were sent twice, because their engine was killed,
            some may be `unchanged`.
        error: why the run cannot go on, and the name of its class in `semkv_rag.errors`.
    """

    names: tuple[str, ...]
    result: PrecomputeResult = field(default_factory=PrecomputeResult)
    error: tuple[str, str] | None = None

    def check(self) -> None:
        """Raise the error, if there is one.

        Raises:
            SemKVError: of the class that it had there.
        """
        if self.error is not None:
            kind = getattr(errors, self.error[0], errors.EngineError)
            raise kind(self.error[1])

    def to_row(self) -> dict[str, str]:
        return {OUTCOME: json.dumps(asdict(self))}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Outcome:
        given = json.loads(row[OUTCOME])
        result = given["result"]
        result["failures"] = [Failure(**one) for one in result["failures"]]
        error = given["error"]
        return cls(
            tuple(given["names"]),
            PrecomputeResult(**result),
            None if error is None else (error[0], error[1]),
        )


def parcels(documents: Sequence[DocumentText], engines: int) -> Iterator[dict[str, str]]:
    """Documents as rows, several small ones in one; the largest first, so that the end is short."""
    total = sum(len(one.text) for one in documents)
    most = min(PARCEL_CHARACTERS, total // (PARCELS_OF_AN_ENGINE * engines))
    parcel: list[DocumentText] = []
    size = 0
    for document in sorted(documents, key=lambda one: (-len(one.text), one.name)):
        if parcel and size + len(document.text) > most:
            yield _row(parcel)
            parcel, size = [], 0
        parcel.append(document)
        size += len(document.text)
    if parcel:
        yield _row(parcel)


def documents_of(parcel: str) -> list[DocumentText]:
    """The documents of a row."""
    return [DocumentText(**one) for one in json.loads(parcel)]


def _row(documents: Sequence[DocumentText]) -> dict[str, str]:
    return {PARCEL: json.dumps([asdict(one) for one in documents])}
