"""Rows and files, kept in step: how a chunk is promised and how it goes.

The order is what makes the promise hold, whoever is killed when. A chunk comes file first, then row;
it goes row first, then file. Rows are added, and files of dropped rows unlinked, under the writers'
lock, so that nobody's file is unlinked between being looked at and being promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

from sqlalchemy import Connection

from semkv_rag.errors import ObjectStoreError, StoreError
from semkv_rag.store.files.paths import chunk_path, chunk_paths
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.gone import BATCH, GoneFile
from semkv_rag.store.index import chunks
from semkv_rag.store.index.chunks import FoundChunk
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.records import ChunkKey, ChunkRecord


class Contents:
    """The chunks of one store: its files and their rows.

    Attributes:
        root: the folder that the files' paths are below.
        files: what opens and removes them.
    """

    def __init__(self, files: LocalFiles, database: Database) -> None:
        self.root, self.files = files.root, files
        self._database = database

    def pages(self, model: str | None, namespace: str | None) -> Iterator[list[ChunkRecord]]:
        """All records in the order of their ids; each list is of one moment."""
        after = ""
        while True:
            with self._database.reading() as connection:
                page = chunks.page(connection, after, model, namespace)
            if not page:
                return
            yield page
            after = page[-1].id

    def find(self, key: ChunkKey) -> FoundChunk | None:
        """A chunk as its files say, or None when they are not all there or not sound.

        Reads the first rank's header only.
        """
        try:
            path = chunk_path(self.root, key.model, key.namespace, key.id, 0)
            with self.files.chunk(path, model=key.model, chunk_id=key.id) as file:
                header = file.header
            if header.namespace != key.namespace:
                return None
        except ObjectStoreError:
            raise  # nobody knows whether it is there
        except StoreError:
            return None
        sizes = self._sizes(key, header.world_size)
        return None if None in sizes else FoundChunk(header, sum(filter(None, sizes)))

    def add(self, keys: Iterable[ChunkKey], *, mending: bool = False) -> set[str]:
        """Promise those of the chunks whose files are there; their ids.

        Args:
            mending: their files were there before, so do it on a full disk, too.
        """
        taken: set[str] = set()
        for batch in chunks.pieces(keys, FREED if mending else BATCH):
            found = [(key, chunk) for key in batch if (chunk := self.find(key))]
            if mending:
                taken |= self._database.freeing(partial(self._put, found))
            else:
                with self._database.writing() as connection:
                    taken |= self._put(found, connection)
        return taken

    def drop(self, connection: Connection, records: Sequence[ChunkRecord]) -> list[GoneFile]:
        """Take back promises; the files that are to be unlinked after the commit."""
        chunks.drop(connection, records)
        return [
            GoneFile(record.id, path, seen, self.files)
            for record in records
            for path in chunk_paths(self.root, record, record.ranks)
            if (seen := self.files.seen(path))
        ]

    def _sizes(self, key: ChunkKey, ranks: int) -> list[int | None]:
        """Of a chunk's files; None for one that is not there."""
        return self.files.sizes(chunk_paths(self.root, key, ranks))

    def _put(
        self, found: Sequence[tuple[ChunkKey, FoundChunk]], connection: Connection
    ) -> set[str]:
        # Looked at again under the lock: an eviction may have been under way.
        paths = [chunk_paths(self.root, key, chunk.header.world_size) for key, chunk in found]
        sizes = iter(self.files.sizes(list(chain.from_iterable(paths))))
        still_there = [
            chunk
            for (_, chunk), own in zip(found, paths, strict=True)
            if None not in list(islice(sizes, len(own)))
        ]
        chunks.put(connection, still_there)
        return {chunk.header.id for chunk in still_there}
