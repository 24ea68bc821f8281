"""Images' features: their files and rows, kept in step as those of chunks are.

Loaded by the engine's scheduler when an image's features are needed, written by a worker after they
were computed, by any number of processes. A state's file is on disk before its row and goes after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from sqlalchemy import Connection
from torch import Tensor

from semkv_rag.errors import StateFileError, StoreLimitError
from semkv_rag.store.admission import Admission, Newcomer
from semkv_rag.store.files.paths import state_path, state_paths
from semkv_rag.store.files.state_file import StateHeader, state_id, write_state
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.gone import BATCH, GoneFile, last_removal, unlink
from semkv_rag.store.index import removals, states
from semkv_rag.store.index.chunks import pieces
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.records import StateRecord


class StoredStates:
    """The states of one store; what asks the index raises StoreError as the store's own methods do.

    Attributes:
        admission: what keeps them within the store's limits; set by the store.
    """

    def __init__(self, files: LocalFiles, database: Database) -> None:
        self.root, self._files = files.root, files
        self._database = database
        self.admission: Admission | None = None

    def path(self, model: str, namespace: str, key: str) -> Path:
        """Where a state's file is or goes. Asks no one."""
        return state_path(self.root, model, namespace, state_id(model, namespace, key))

    def put(self, model: str, namespace: str, key: str, state: Tensor) -> int:
        """Store an image's state, in place of the one it had; its bytes.

        Args:
            key: which image, 64 hex digits.
            state: [image tokens, width], on any device.

        Raises:
            StoreError: it has another shape, or holds NaN or infinity.
            StoreLimitError: there is no room for it within the store's limits.
            OSError: its file could not be written.
        """
        self._database.require_writing()
        path = self.path(model, namespace, key)
        size = self._files.write(
            path, lambda place: write_state(place, model, namespace, key, state)
        )
        self.promise([path])
        return size

    def load(self, model: str, namespace: str, key: str) -> Tensor | None:
        """An image's state, [image tokens, width] on the CPU, or None when there is none.

        Asks the file, not the index; all of it was checked.

        Raises:
            StoreError: the file is torn, altered, or another model's or image's.
        """
        path = self.path(model, namespace, key)
        if not self._files.may_be(path):
            return None
        id_ = state_id(model, namespace, key)
        try:
            with self._files.state(path, model=model, state_id=id_, for_request=True) as file:
                return file.state()
        except StateFileError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def has(self, model: str, namespace: str, key: str) -> bool:
        """Whether an image's state is promised."""
        id_ = state_id(model, namespace, key)
        with self._database.reading() as connection:
            return bool(states.present(connection, [id_]))

    def records(
        self, model: str | None = None, namespace: str | None = None
    ) -> Iterator[StateRecord]:
        """Every state's record, in the order of the ids; None is any model or namespace."""
        after = ""
        while True:
            with self._database.reading() as connection:
                page = states.page(connection, after, model, namespace)
            if not page:
                return
            yield from page
            after = page[-1].id

    def touch(self, ids: Iterable[str]) -> None:
        """Note that states were used now: they are evicted later. Nothing when only reading.

        Raises:
            StoreError: others wrote for long (`sqlite.LAZY_S`): the note is lost, nothing else.
        """
        if not self._database.read_only:
            with self._database.writing(durable=False, late=True) as connection:
                states.touch(connection, ids, time.time())

    def remove(self, ids: Iterable[str]) -> int:
        """Remove states, rows first, then files; how many were there."""
        removed = 0
        for batch in pieces(ids, FREED):
            found, gone = self._database.freeing(partial(self._drop_ids, batch))
            unlink(self._database, self.root, gone)
            removed += found
        return removed

    def _drop_ids(self, ids: Iterable[str], connection: Connection) -> tuple[int, list[GoneFile]]:
        found = states.find(connection, ids)
        return len(found), self.drop(connection, found)

    def promise(self, paths: Iterable[Path], *, mending: bool = False) -> None:
        """Write the rows of those of the files that are there and sound; reads their headers only.

        Args:
            mending: their files were there before, so do it on a full disk, too, and past limits.

        Raises:
            StoreLimitError: there is no room for them, and their files are gone.
        """
        for batch in pieces(paths, FREED if mending else BATCH):
            before = last_removal(self._database, self._files)
            found = [(path, record) for path in batch if (record := self._record(path))]
            if self._files.in_object_store:  # beside the lock: these take a while
                sizes = self._files.sizes([path for path, _ in found])
                found = [one for one, size in zip(found, sizes, strict=True) if size is not None]
            put = partial(self._put, found, before)
            if mending:
                self._database.freeing(put)
            else:
                self._admit(found, put)

    def _admit(
        self, found: Sequence[tuple[Path, StateRecord]], put: Callable[[Connection], None]
    ) -> None:
        if self.admission is None:
            with self._database.writing() as connection:
                put(connection)
            return
        newcomers = [Newcomer(r.id, r.model, r.namespace, r.bytes) for _, r in found]
        try:
            self.admission(newcomers, put)
        except StoreLimitError:
            there = [(record.id, path, self._files.seen(path)) for path, record in found]
            gone = [GoneFile(id_, path, seen, self._files) for id_, path, seen in there if seen]
            unlink(self._database, self.root, gone)
            raise

    def drop(self, connection: Connection, records: Sequence[StateRecord]) -> list[GoneFile]:
        """Take back promises; the files that are to be unlinked after the commit."""
        states.drop(connection, [record.id for record in records])
        return [
            GoneFile(record.id, path, seen, self._files)
            for record in records
            for path in state_paths(self.root, record)
            if (seen := self._files.seen(path))
        ]

    def _record(self, path: Path) -> StateRecord | None:
        """A state's row as its file says, or None when that is not sound."""
        try:
            with self._files.state(path, model=None) as file:
                return record_of(file.header, file.size_bytes)
        except StateFileError:
            return None

    def _put(
        self,
        found: Sequence[tuple[Path, StateRecord]],
        before: int,
        connection: Connection,
    ) -> None:
        # Looked at again under the lock: an eviction may have been under way.
        if self._files.in_object_store:
            keys = [self._files.key(path) for path, _ in found]
            going = removals.since(connection, keys, before)
            there = [
                record for (_, record), key in zip(found, keys, strict=True) if key not in going
            ]
        else:
            sizes = self._files.sizes([path for path, _ in found])
            there = [
                record for (_, record), size in zip(found, sizes, strict=True) if size is not None
            ]
        states.put(connection, there)


def record_of(header: StateHeader, size: int) -> StateRecord:
    """The row of a state that was not used yet."""
    return StateRecord(
        id=header.id,
        model=header.model,
        namespace=header.namespace,
        key=header.key,
        rows=header.rows,
        width=header.width,
        dtype=header.dtype,
        bytes=size,
        created_at=header.created_at,
        used_at=header.created_at,
    )
