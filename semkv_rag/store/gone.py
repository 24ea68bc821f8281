"""Files whose promise was taken back, and how they are unlinked without hurting anybody."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from semkv_rag.store.files.paths import ALWAYS, Identity, chunk_paths, state_paths
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.index import chunks, removals
from semkv_rag.store.index.database import FREED, Database

BATCH = 256
"""What is added or removed in one transaction: little enough that other writers do not wait."""

STUCK_S: Final = 60.0
"""After so long the next writer deletes an object that another one was to delete: it was killed."""


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
    for files, own in groupby(gone, key=lambda file: file.files):
        if files.in_object_store:
            for batch in chunks.pieces(own, FREED):
                _delete(database, files, batch)
            continue
        for batch in chunks.pieces(own, BATCH):
            with database.writing() as connection:
                kept = promised(connection, root, {file.id for file in batch})
                files.remove([(one.path, one.identity) for one in batch if one.path not in kept])
    database.keep_reserve()


def last_removal(database: Database, files: LocalFiles) -> int:
    """The number of the removal that ended last; asked before it is looked whether files are there.

    What somebody else was to delete, and has not, is deleted first: nobody may promise it before.
    0 for files of a folder, which are looked at under the writers' lock.
    """
    if not files.in_object_store:
        return 0
    finish(database, files)
    with database.scanning() as connection:
        return removals.last(connection)


def finish(database: Database, files: LocalFiles) -> None:
    """Delete the objects that somebody else was to delete and has not."""
    if not files.in_object_store:
        return
    with database.scanning() as connection:
        left = removals.stuck(connection, time.time() - STUCK_S)
    while left:
        with database.writing() as connection:
            # Looked at again under the lock: others may have deleted them, and promised them since.
            left = removals.stuck(connection, time.time() - STUCK_S)[:FREED]
            removals.begin(connection, left, time.time())
        if left:
            _deleted(database, files, [files.root / key for key in left])


def _delete(database: Database, files: LocalFiles, gone: Sequence[GoneFile]) -> None:
    """Delete objects that nobody promises. Writers do not wait meanwhile, see `index.removals`."""
    ids, now = {files.key(file.path): file.id for file in gone}, time.time()
    database.freeing(lambda index: removals.begin_unpromised(index, ids, now), late=True)
    with database.scanning() as connection:
        begun = removals.begun(connection, ids, now)
    if begun:
        _deleted(database, files, [files.root / key for key in begun])


def _deleted(database: Database, files: LocalFiles, paths: Sequence[Path]) -> None:
    """Delete objects whose removal has begun, and note that it has ended, if it has."""
    if files.remove([(path, ALWAYS) for path in paths]):
        with database.writing(late=True) as connection:
            removals.end(connection, [files.key(path) for path in paths], time.time())


def promised(connection: Connection, root: Path, ids: Collection[str]) -> set[Path]:
    """The files that the index promises of chunks and states with these ids."""
    paths: set[Path] = set()
    for key, ranks in removals.promised(connection, ids):
        paths.update(chunk_paths(root, key, ranks) if ranks else state_paths(root, key))
    return paths
