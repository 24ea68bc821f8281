"""Files whose promise was taken back, and how they are unlinked without hurting anybody."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sqlalchemy import Connection

from semkv_rag.store.files.paths import Identity, chunk_paths, state_paths
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.index import chunks, states
from semkv_rag.store.index.database import Database

BATCH = 256
"""What is added or removed in one transaction: little enough that other writers do not wait."""


@dataclass(frozen=True, slots=True)
class GoneFile:
    """A file whose chunk or state was dropped, as it was then.

    Attributes:
        files: those that it is one of.
    """

    id: str
    path: Path
    identity: Identity
    files: LocalFiles


def unlink(database: Database, root: Path, gone: Sequence[GoneFile]) -> None:
    """Remove files, unless somebody promised or wrote them again meanwhile."""
    for batch in chunks.pieces(gone, BATCH):
        with database.writing() as connection:
            kept = promised(connection, root, {file.id for file in batch})
            for files, own in groupby(batch, key=lambda file: file.files):
                files.remove([(one.path, one.identity) for one in own if one.path not in kept])
    database.keep_reserve()


def promised(connection: Connection, root: Path, ids: Collection[str]) -> set[Path]:
    """The files that the index promises of chunks and states with these ids."""
    paths: set[Path] = set()
    for chunk in chunks.find(connection, ids):
        paths.update(chunk_paths(root, chunk, chunk.ranks))
    for state in states.find(connection, ids):
        paths.update(state_paths(root, state))
    return paths
