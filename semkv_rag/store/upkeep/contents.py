"""Rows and files, kept in step: how a chunk is promised and how it goes.

The order is what makes the promise hold, whoever is killed when. A chunk comes file first, then row;
it goes row first, then file. Rows are added, and files of dropped rows unlinked, under the writers'
lock, so that nobody's file is unlinked between being looked at and being promised. Objects are deleted
beside it, see `index.removals`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Final, TypeVar

from sqlalchemy import Connection

from semkv_rag.errors import ObjectStoreError, StoreError, StoreLimitError
from semkv_rag.store.admission import Admission, Newcomer
from semkv_rag.store.files.header import ChunkHeader
from semkv_rag.store.files.paths import chunk_path, chunk_paths
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.gone import BATCH, GoneFile, last_removal, unlink
from semkv_rag.store.index import chunks, promises, removals
from semkv_rag.store.index.chunks import FoundChunk
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.index.guard import Refused
from semkv_rag.store.records import ChunkKey, ChunkRecord

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PAUSES_S: Final = (0.5, 2.0, 8.0, 20.0, 40.0)
"""Before an object store that failed is asked once more: an engine has computed what is to be added.
Together longer than `gone.STUCK_S`."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the index said before files were looked for.

    Attributes:
        removal: the number of the last removal.
        none_there: whether it promised none of their chunks; not asked for files of a folder.
    """

    removal: int
    none_there: bool


class Contents:
    """The chunks of one store: its files and their rows.

    Attributes:
        root: the folder that the files' paths are below.
        files: what opens and removes them.
        admission: what keeps them within the store's limits; set by the store.
    """

    def __init__(self, files: LocalFiles, database: Database) -> None:
        self.root, self.files = files.root, files
        self._database = database
        self.admission: Admission | None = None

    def pages(self, model: str | None, namespace: str | None) -> Iterator[list[ChunkRecord]]:
        """All records in the order of their ids; each list is of one moment."""
        after = ""
        while True:
            with self._database.scanning() as connection:
                page = chunks.page(connection, after, model, namespace)
            if not page:
                return
            yield page
            after = page[-1].id

    def find(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, FoundChunk]]:
        """Those of some chunks whose files are all there and sound, and what these say.

        Reads the first rank's header only.
        """
        opened = [(key, headed) for key in keys if (headed := self._header(key))]
        paths = [chunk_paths(self.root, key, header.world_size) for key, (header, _) in opened]
        sizes = iter(self.files.sizes(list(chain.from_iterable(paths))))
        found: list[tuple[ChunkKey, FoundChunk]] = []
        for (key, (header, size)), own_paths in zip(opened, paths, strict=True):
            own = list(islice(sizes, len(own_paths)))
            if own and own[0] not in (None, size) and self.files.forget(own_paths[0]):
                found += self.find([key])  # the copy here was that of before it was recoded
            elif None not in own:
                found.append((key, FoundChunk(header, sum(filter(None, own)))))
        return found

    def _header(self, key: ChunkKey) -> tuple[ChunkHeader, int] | None:
        """What the first rank's file says, and its bytes; None when it is not there or not sound."""
        try:
            path = chunk_path(self.root, key.model, key.namespace, key.id, 0)
            with self.files.chunk(path, model=key.model, chunk_id=key.id) as file:
                header, size = file.header, file.size_bytes
        except ObjectStoreError:
            raise  # nobody knows whether it is there
        except StoreError:
            return None
        return (header, size) if header.namespace == key.namespace else None

    def add(
        self, keys: Iterable[ChunkKey], *, kept: Collection[str] = (), mending: bool = False
    ) -> set[str]:
        """Promise those of the chunks whose files are there; their ids.

        Args:
            kept: ids of others that make no room for these.
            mending: their files were there before, so do it on a full disk, too, and past limits.

        Raises:
            StoreLimitError: there is no room for some, and the files of these are gone.
            ObjectStoreError: the object store failed, and failed again after each of `PAUSES_S`.
        """
        taken: set[str] = set()
        fault: StoreLimitError | None = None
        for batch in chunks.pieces(keys, FREED if mending else BATCH):
            work = partial(self._add, batch, taken, kept, mending=mending)
            fault = _patiently(work) or fault
        if fault is not None:
            raise fault
        return taken

    def drop(self, connection: Connection, records: Sequence[ChunkRecord]) -> list[GoneFile]:
        """Take back promises; the files that are to be unlinked after the commit."""
        promises.drop(connection, records)
        return [
            GoneFile(record.id, path, seen, self.files)
            for record in records
            for path in chunk_paths(self.root, record, record.ranks)
            if (seen := self.files.seen(path))
        ]

    def drop_ids(
        self, model: str, namespace: str, ids: Iterable[str], connection: Connection
    ) -> tuple[int, list[GoneFile]]:
        """`drop` of those of `ids` that are there: how many, and their files."""
        found = chunks.records(connection, ids, model, namespace)
        return len(found), self.drop(connection, found)

    def _add(
        self, batch: Sequence[ChunkKey], taken: set[str], kept: Collection[str], *, mending: bool
    ) -> StoreLimitError | None:
        """`add` for some of the chunks; those that are promised go into `taken`."""
        before = self._seen(batch)
        found = self.find(batch)
        try:
            if not mending:
                return self._admit(found, before, taken, kept)
            taken |= self._database.freeing(partial(self._put, found, before))
        except Refused as error:
            raise ObjectStoreError("others add or delete some of its objects") from error
        return None

    def _seen(self, batch: Sequence[ChunkKey]) -> _Seen:
        removal = last_removal(self._database, self.files)
        if not self.files.in_object_store:
            return _Seen(removal, none_there=False)
        with self._database.scanning() as connection:
            return _Seen(removal, not chunks.find(connection, [key.id for key in batch]))

    def _admit(
        self,
        found: Sequence[tuple[ChunkKey, FoundChunk]],
        before: _Seen,
        taken: set[str],
        kept: Collection[str],
    ) -> StoreLimitError | None:
        """Promise those of some chunks that there is room for, into `taken`; the fault of the others.

        Args:
            before: what the index said before they were looked for.
        """
        put = partial(self._put, found, before)
        if self.admission is None:
            with self._database.writing(late=self.files.in_object_store) as connection:
                promised = put(connection)
            taken |= promised
            return None
        newcomers = [Newcomer(k.id, k.model, k.namespace, chunk.bytes) for k, chunk in found]
        try:
            taken |= self.admission(newcomers, put, {*taken, *kept})
        except StoreLimitError as error:
            if len(found) > 1:
                half = len(found) // 2
                first = self._admit(found[:half], before, taken, kept)
                return self._admit(found[half:], before, taken, kept) or first
            ((key, chunk),) = found
            paths = chunk_paths(self.root, key, chunk.header.world_size)
            there = [(path, self.files.seen(path)) for path in paths]
            gone = [GoneFile(key.id, path, at, self.files) for path, at in there if at]
            unlink(self._database, self.root, gone)
            return error
        return None

    def _put(
        self,
        found: Sequence[tuple[ChunkKey, FoundChunk]],
        before: _Seen,
        connection: Connection,
    ) -> set[str]:
        # Looked at again under the lock: an eviction may have been under way.
        paths = [chunk_paths(self.root, key, chunk.header.world_size) for key, chunk in found]
        if self.files.in_object_store:
            keys = [self.files.key(path) for own in paths for path in own]
            put = promises.put_new if before.none_there else promises.put
            put(connection, [chunk for _, chunk in found])
            removals.refuse_since(connection, keys, before.removal)
            return {chunk.header.id for _, chunk in found}
        sizes = iter(self.files.sizes(list(chain.from_iterable(paths))))
        still_there = [
            chunk
            for (_, chunk), own in zip(found, paths, strict=True)
            if None not in list(islice(sizes, len(own)))
        ]
        promises.put(connection, still_there)
        return {chunk.header.id for chunk in still_there}


def _patiently(work: Callable[[], Result]) -> Result:
    """What `work` returns, called again when the object store failed; no lock is held between."""
    for pause_s in PAUSES_S:
        try:
            return work()
        except ObjectStoreError as error:
            logger.info("semkv: the store is asked again in %g s: %s", pause_s, error)
        time.sleep(pause_s)
    return work()
