"""Checking the store's promises against its files, and mending what is wrong.

Run by people (`semkv verify`) while others go on using the store. Every finding is checked again
under the writers' lock before anything is changed for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from sqlalchemy import Connection

from semkv_rag.errors import ChunkFileError, StateFileError, StoreError, StoreVersionError
from semkv_rag.reuse.tokens import StoredTokens
from semkv_rag.store.chunk_file import ChunkFile
from semkv_rag.store.contents import Contents
from semkv_rag.store.gone import BATCH, GoneFile, unlink
from semkv_rag.store.header import ChunkHeader
from semkv_rag.store.index import chunks, states
from semkv_rag.store.index.database import Database
from semkv_rag.store.layout import (
    chunk_files,
    chunk_path,
    identity,
    state_files,
    state_path,
    temporary_files,
)
from semkv_rag.store.records import ChunkKey, ChunkRecord, Problem, StateRecord, VerifyReport
from semkv_rag.store.state_file import StateFile
from semkv_rag.store.states import StoredStates

Orphan = TypeVar("Orphan")

DEBRIS_AGE_S = 3600.0
"""A temporary file that old is no writer's any more: writing one takes seconds."""


def verify(
    database: Database,
    contents: Contents,
    stored_states: StoredStates,
    *,
    repair: bool,
    tensors: bool,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """What `KVStore.verify` and, without reading the tensors, `KVStore.rebuild_index` do."""
    if repair:
        database.require_writing()
    run = _Run(database, contents, stored_states, repair=repair, tensors=tensors, progress=progress)
    run.check_promises()
    run.check_states()
    run.check_files()
    run.check_state_files()
    run.check_temporary_files()
    return VerifyReport(
        chunks=run.chunks,
        bytes=run.bytes,
        problems=tuple(run.problems),
        notices=tuple(run.notices),
        repaired=repair,
        states=run.states,
    )


class _Run:
    def __init__(
        self,
        database: Database,
        contents: Contents,
        stored_states: StoredStates,
        *,
        repair: bool,
        tensors: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._database = database
        self._contents = contents
        self._states = stored_states
        self._repair = repair
        self._tensors = tensors
        self._progress = progress
        self.chunks = 0
        self.states = 0
        self.bytes = 0
        self.problems: list[Problem] = []
        self.notices: list[Problem] = []

    def check_promises(self) -> None:
        """Every row: its files are there and sound, and hold the tokens that the index holds."""
        with self._database.reading() as connection:
            total = sum(entry.chunks for entry in chunks.stats(connection, None))
        for page in self._contents.pages(None, None):
            for batch in chunks.pieces(page, BATCH):
                stored = self._stored_tokens(batch)
                for record in batch:
                    self._check_promise(record, stored)
                    self.chunks += 1
                    if self._progress:
                        self._progress(self.chunks, max(total, self.chunks))

    def check_states(self) -> None:
        """Every state's row: its file is there and sound."""
        for record in self._states.records():
            self._check_state(record)
            self.states += 1

    def check_files(self) -> None:
        """Every chunk's file that the index does not know."""
        for batch in chunks.pieces(chunk_files(self._contents.root)):
            by_path = {path: path.name.split(".")[0] for path in batch}
            with self._database.reading() as connection:
                promised = chunks.present(connection, by_path.values())
            unknown = [path for path, id_ in by_path.items() if id_ not in promised]
            orphans = [
                key for path in unknown if (key := self._check_orphan(path, self._read_chunk))
            ]
            if self._repair:
                self._contents.add(orphans)

    def check_state_files(self) -> None:
        """Every state's file that the index does not know."""
        for batch in chunks.pieces(state_files(self._contents.root)):
            by_path = {path: path.name.split(".")[0] for path in batch}
            with self._database.reading() as connection:
                promised = states.present(connection, by_path.values())
            unknown = [path for path, id_ in by_path.items() if id_ not in promised]
            orphans = [path for path in unknown if self._check_orphan(path, self._read_state)]
            if self._repair:
                self._states.promise(orphans)

    def check_temporary_files(self) -> None:
        """What killed writers left; it goes once it is old, because nobody can want it."""
        if self._database.read_only:
            return
        for path in temporary_files(self._contents.root):
            with suppress(FileNotFoundError):  # its writer is alive, and was done
                if time.time() - path.stat().st_mtime > DEBRIS_AGE_S:
                    path.unlink()
                    self._notice("debris", path, "left by a writer that was killed; removed")

    def _stored_tokens(self, batch: Sequence[ChunkRecord]) -> dict[str, StoredTokens]:
        owners = {(record.model, record.namespace) for record in batch}
        ids = [record.id for record in batch]
        stored: dict[str, StoredTokens] = {}
        with self._database.reading() as connection:
            for model, namespace in owners:
                stored |= chunks.tokens(connection, ids, model, namespace)
        return stored

    def _check_promise(self, record: ChunkRecord, stored: Mapping[str, StoredTokens]) -> None:
        paths = self._contents.paths(record, record.ranks)
        while True:
            seen = [identity(path) for path in paths]
            found = self._broken_rank(record, paths, stored.get(record.id))
            if found is None:
                return
            with self._checking() as connection:
                if not chunks.present(connection, [record.id]):
                    return  # it was evicted meanwhile
                if [identity(path) for path in paths] != seen:
                    continue  # it was written again
                if self._repair:
                    # The files are left to `check_files`, as files that the index does not know.
                    self._contents.drop(connection, [record])
            rank, text = found
            self._problem("damaged" if seen[rank] else "missing", paths[rank], text)
            return

    def _broken_rank(
        self, record: ChunkRecord, paths: Sequence[Path], stored: StoredTokens | None
    ) -> tuple[int, str] | None:
        """The first of a chunk's files that is not as promised, and why."""
        size = 0
        for rank, path in enumerate(paths):
            try:
                header, bytes_ = self._read(path, record, rank)
            except (StoreError, OSError) as error:
                return rank, str(error)
            if stored is not None and not _same_tokens(stored, header):
                return rank, "the index holds other tokens than its file"
            size += bytes_
        self.bytes += size
        return None

    def _checking(self) -> AbstractContextManager[Connection]:
        """What is seen in this transaction is not changed by others, when we may lock them out."""
        return self._database.reading() if self._database.read_only else self._database.writing()

    def _read(self, path: Path, record: ChunkRecord, rank: int) -> tuple[ChunkHeader, int]:
        with ChunkFile(path, model=record.model, chunk_id=record.id) as file:
            header = file.header
            if (header.rank, header.world_size) != (rank, record.ranks):
                raise ChunkFileError(
                    f"chunk file {path.name} is rank {header.rank} of {header.world_size}"
                )
            if self._tensors:
                file.verify()
            return header, file.size_bytes

    def _check_state(self, record: StateRecord) -> None:
        path = state_path(self._contents.root, record.model, record.namespace, record.id)
        while True:
            seen = identity(path)
            try:
                with StateFile(path, model=record.model, state_id=record.id) as file:
                    if self._tensors:
                        file.verify()
                    self.bytes += file.size_bytes
                return
            except StoreError as error:
                text = str(error)
            with self._checking() as connection:
                if not states.present(connection, [record.id]):
                    return  # it was evicted meanwhile
                if identity(path) != seen:
                    continue  # it was written again
                if self._repair:
                    # The file is left to `check_state_files`.
                    self._states.drop(connection, [record])
            self._problem("damaged" if seen else "missing", path, text)
            return

    def _check_orphan(self, path: Path, read: Callable[[Path], Orphan | None]) -> Orphan | None:
        """What to promise, when this is the first file of a chunk, or a state, that is whole."""
        seen = identity(path)
        if seen is None:
            return None
        try:
            orphan = read(path)
        except StoreVersionError as error:
            self._notice("orphan", path, str(error))
            return None
        except StoreError as error:
            self._notice("debris", path, str(error))
            # What the system cannot read now may be sound.
            if self._repair and not isinstance(error.__cause__, OSError):
                unlink(self._database, [GoneFile(path.name.split(".")[0], path, seen)])
            return None
        if orphan is not None:
            self._notice("orphan", path, "sound, and not in the index")
        return orphan

    def _read_chunk(self, path: Path) -> ChunkKey | None:
        with ChunkFile(path, model=None) as file:
            header = file.header
            if self._tensors:
                file.verify()
        place = chunk_path(
            self._contents.root, header.model, header.namespace, header.id, header.rank
        )
        if place != path:
            raise ChunkFileError(f"chunk file {path.name} is not where it belongs")
        if header.rank > 0:
            return None  # comes and goes with the first rank's
        return ChunkKey(header.id, header.model, header.namespace)

    def _read_state(self, path: Path) -> Path:
        with StateFile(path, model=None) as file:
            header = file.header
            if self._tensors:
                file.verify()
        if state_path(self._contents.root, header.model, header.namespace, header.id) != path:
            raise StateFileError(f"state file {path.name} is not where it belongs")
        return path

    def _problem(self, kind: str, path: Path, text: str) -> None:
        self.problems.append(self._finding(kind, path, text))

    def _notice(self, kind: str, path: Path, text: str) -> None:
        self.notices.append(self._finding(kind, path, text))

    def _finding(self, kind: str, path: Path, text: str) -> Problem:
        return Problem(kind, str(path.relative_to(self._contents.root)), text)


def _same_tokens(stored: StoredTokens, header: ChunkHeader) -> bool:
    return np.array_equal(stored.tokens, header.tokens) and np.array_equal(
        stored.context, header.context
    )
