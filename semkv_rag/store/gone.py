"""Files whose promise was taken back, and how they are unlinked without hurting anybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semkv_rag.store.index import chunks, states
from semkv_rag.store.index.database import Database
from semkv_rag.store.layout import Identity, identity

BATCH = 256
"""What is added or removed in one transaction: little enough that other writers do not wait."""


@dataclass(frozen=True, slots=True)
class GoneFile:
    """A file whose chunk or state was dropped, as it was then."""

    id: str
    path: Path
    identity: Identity


def unlink(database: Database, gone: Sequence[GoneFile]) -> None:
    """Remove files, unless somebody promised or wrote them again meanwhile."""
    for batch in chunks.pieces(gone, BATCH):
        ids = {file.id for file in batch}
        with database.writing() as connection:
            back = chunks.present(connection, ids) | states.present(connection, ids)
            for file in batch:
                if file.id not in back and identity(file.path) == file.identity:
                    file.path.unlink(missing_ok=True)
