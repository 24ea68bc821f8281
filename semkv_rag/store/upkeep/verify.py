"""Checking the store's promises against its files, and mending what is wrong.

Run by people (`semkv verify`) while others go on using the store. Every finding is checked again
under the writers' lock before anything is changed for it. Whatever a file or a row holds, it is a
finding, and the run goes on with the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from sqlalchemy import Connection

from semkv_rag.errors import ChunkFileError, SemKVError
from semkv_rag.reuse.tokens import StoredTokens
from semkv_rag.store.files.beneath import NotAFileError, open_file, remove_if_possible, status
from semkv_rag.store.files.chunk_file import ChunkFile
from semkv_rag.store.files.header import ChunkHeader
from semkv_rag.store.files.paths import (
    Identity,
    chunk_files,
    chunk_path,
    chunk_paths,
    identity,
    links,
    temporary_files,
)
from semkv_rag.store.files.tensor_writer import lock_abandoned
from semkv_rag.store.gone import BATCH, GoneFile, unlink
from semkv_rag.store.identity import FILE, is_sound
from semkv_rag.store.index import chunks
from semkv_rag.store.index.database import Database
from semkv_rag.store.records import ChunkKey, ChunkRecord, VerifyReport
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.findings import BrokenError
from semkv_rag.store.upkeep.verify_states import StateChecks

DEBRIS_AGE_S: Final = 3600.0
"""What nobody has written to for so long is of no writer that is under way: writing takes seconds."""


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
    run.check_feed()
    run.check_links()
    run.check_promises()
    run.check_states()
    run.check_files()
    run.check_state_files()
    run.check_temporary_files()
    return run.report()


@dataclass(frozen=True, eq=False)
class _Orphan:
    """A sound file that no row promises."""

    path: Path
    header: ChunkHeader


class _Run(StateChecks):
    def check_links(self) -> None:
        """Links in the place of folders, and what stands in the place of the store's name."""
        for path in links(self._root):
            self._notice("debris", path, "is a symbolic link; nothing behind it is read or changed")
            if self._repair:
                remove_if_possible(path)
        if not is_sound(self._root):
            self._notice("debris", self._root / FILE, "is not a store's name")
            if self._repair:
                remove_if_possible(self._root / FILE)

    def check_promises(self) -> None:
        """Every row: its files are there and sound, and what the index holds is what they say."""
        with self._database.scanning() as connection:
            total = sum(entry.chunks for entry in chunks.stats(connection, None))
        for page in self._contents.pages(None, None):
            for batch in chunks.pieces(page, BATCH):
                stored = self._stored_tokens(batch)
                for record in batch:
                    self._check_promise(record, stored.get(record.id))
                    self.chunks += 1
                    if self._progress:
                        self._progress(self.chunks, max(total, self.chunks))

    def check_files(self) -> None:
        """Every chunk's file that the index does not promise."""
        for unknown in self._unknown(chunk_files(self._root)):
            orphans = [
                _Orphan(path, header)
                for path in unknown
                if (header := self._checked(path, self._read_chunk))
            ]
            by_chunk = sorted(orphans, key=lambda orphan: (orphan.header.id, orphan.header.rank))
            whole: list[ChunkKey] = []
            for _, group in groupby(by_chunk, key=lambda orphan: orphan.header.id):
                parts = list(group)
                first = parts[0].header
                own = [part for part in parts if part.header.world_size == first.world_size]
                if [part.header.rank for part in own] != list(range(first.world_size)):
                    self._check_parts(parts)
                    continue
                whole.append(ChunkKey(first.id, first.model, first.namespace))
                for part in own:
                    self._take_in(part.path)
                self._check_parts([part for part in parts if part not in own])
            if self._repair:
                self._contents.add(whole, mending=True)

    def check_temporary_files(self) -> None:
        """What killed writers left; it goes once it is old, because nobody can want it.

        A writer that is alive holds a lock on its file, whatever its clock and ours say.
        """
        if self._database.read_only:
            return
        for path in temporary_files(self._root):
            if not _is_old(path):
                continue
            try:
                handle = open_file(path, os.O_RDWR)
            except NotAFileError as error:
                remove_if_possible(path)
                self._notice("debris", path, f"{error.strerror}; removed")
                continue
            except OSError:
                continue  # its writer was done, or we may not
            try:
                if lock_abandoned(handle):
                    remove_if_possible(path)
                    self._notice("debris", path, "left by a writer that was killed; removed")
            finally:
                os.close(handle)

    def _stored_tokens(self, batch: Sequence[ChunkRecord]) -> dict[str, StoredTokens]:
        owners = {(record.model, record.namespace) for record in batch}
        ids = [record.id for record in batch]
        stored: dict[str, StoredTokens] = {}
        with self._database.scanning() as connection:
            for model, namespace in owners:
                stored |= chunks.tokens(connection, ids, model, namespace)
        return stored

    def _check_promise(self, record: ChunkRecord, stored: StoredTokens | None) -> None:
        while True:
            paths = chunk_paths(self._root, record, record.ranks)
            seen = [identity(path) for path in paths]
            try:
                self._require_kept(record, paths, stored)
            except BrokenError as error:
                broken = error
            else:
                return
            now = self._locked(partial(self._drop_unless_changed, record, stored, seen))
            if now is None:
                return  # it was evicted meanwhile
            if now:
                record, stored = now
                continue  # it was written again
            missing = bool(paths) and seen[broken.rank] is None
            place = paths[broken.rank] if paths else None
            self._problem("missing" if missing else "damaged", place, str(broken))
            return

    def _drop_unless_changed(
        self,
        record: ChunkRecord,
        stored: StoredTokens | None,
        seen: Sequence[Identity | None],
        connection: Connection,
    ) -> tuple[ChunkRecord, StoredTokens | None] | tuple[()] | None:
        """Drop a chunk's broken promise, when that is to be repaired.

        Returns:
            What the index says now, when that or a file changed after it was looked at; nothing when
            none did; None when the chunk is gone.
        """
        now = chunks.find(connection, [record.id])
        if not now:
            return None
        again = replace(now[0], used_at=record.used_at)
        tokens = chunks.tokens(connection, [record.id], record.model, record.namespace)
        found = tokens.get(record.id)
        paths = chunk_paths(self._root, record, record.ranks)
        same = again == record and (found is None) == (stored is None)
        if not same or [identity(path) for path in paths] != seen:
            return again, found
        if self._repair:
            # The files are left to `check_files`, as files that the index does not know.
            self._contents.drop(connection, [record])
            self._dropped.add(record.id)
        return ()

    def _require_kept(
        self, record: ChunkRecord, paths: Sequence[Path], stored: StoredTokens | None
    ) -> None:
        """Raise `BrokenError` at the first of a chunk's files that is not as promised."""
        if not paths:
            raise BrokenError(f"the index holds a chunk {record.id!r} that can have no files")
        size = 0
        headers: list[ChunkHeader] = []
        for rank, path in enumerate(paths):
            try:
                with ChunkFile(path, model=record.model, chunk_id=record.id) as file:
                    if self._tensors:
                        file.verify()
                    headers.append(file.header)
                    size += file.size_bytes
            except SemKVError as error:
                raise BrokenError(error, rank) from error
            text = disagreement(record, stored, headers[rank], rank)
            if text is not None:
                raise BrokenError(text, rank)
        self.bytes += size
        found = (headers[0].kind, headers[0].codec, size)
        if (record.kind, record.codec, record.bytes) != found:
            # So it is for a moment after a chunk was captured anew, too.
            self._notice("stale", paths[0], "the index says another kind, codec or size")
            if self._repair:
                self._contents.add([record], mending=True)

    def _check_parts(self, parts: Sequence[_Orphan]) -> None:
        """Sound files that are not all of a chunk; the others may be on their way."""
        for part in parts:
            text = f"rank {part.header.rank} of {part.header.world_size}, and not all are there"
            seen = identity(part.path)
            if part.header.id in self._dropped or _is_old(part.path):
                self._notice("debris", part.path, text)
                if self._repair and seen:
                    gone = GoneFile(part.header.id, part.path, seen, self._contents.files)
                    unlink(self._database, self._root, [gone])
            else:
                self._notice("orphan", part.path, text)

    def _read_chunk(self, path: Path) -> ChunkHeader:
        with ChunkFile(path, model=None) as file:
            header = file.header
            if self._tensors:
                file.verify()
        place = chunk_path(self._root, header.model, header.namespace, header.id, header.rank)
        if place != path:
            raise ChunkFileError(f"chunk file {path.name} is not where it belongs")
        return header


def disagreement(
    record: ChunkRecord, stored: StoredTokens | None, header: ChunkHeader, rank: int
) -> str | None:
    """What the index says otherwise than a sound file."""
    if (header.rank, header.world_size) != (rank, record.ranks):
        return f"it is rank {header.rank} of {header.world_size}, not {rank} of {record.ranks}"
    if header.namespace != record.namespace:
        return "the index says another namespace than its file"
    if stored is None:
        return "the index does not hold its tokens"
    if not (
        np.array_equal(stored.tokens, header.tokens)
        and np.array_equal(stored.context, header.context)
        and (record.token_count, record.context_count) == (len(header.tokens), len(header.context))
    ):
        return "the index holds other tokens than its file"
    return None


def _is_old(path: Path) -> bool:
    """Whether nobody wrote to a file for long, or its time is long ahead: another clock's."""
    found = status(path)
    return found is not None and abs(time.time() - found.st_mtime) > DEBRIS_AGE_S
