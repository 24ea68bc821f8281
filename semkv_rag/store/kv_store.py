"""The KV store: files of chunks and states under a folder, and the index that says which there are.

Held by every engine (its scheduler asks `changes` and `tokens` at each request, its workers `path`),
by precompute and by the command line; any number of them at once, in any processes. A chunk's file
is on disk before its row and goes after it, so the index never promises a file that is not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import URL
from torch import Tensor

from semkv_rag.closing import Closing
from semkv_rag.errors import OptionError, StoreError
from semkv_rag.reuse.tokens import StoredTokens
from semkv_rag.store.files import paths
from semkv_rag.store.files.beneath import make_folder
from semkv_rag.store.files.chunk_file import ChunkFile, write_chunk
from semkv_rag.store.files.header import ChunkHeader
from semkv_rag.store.gone import unlink
from semkv_rag.store.index import chunks, feed, sources, states
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.lifecycle import Lifecycle
from semkv_rag.store.objects.shared_files import files_of
from semkv_rag.store.place import StorePlace, place_of
from semkv_rag.store.prompts import StoredPrompts
from semkv_rag.store.records import (
    Changes,
    ChunkKey,
    ChunkRecord,
    ModelInfo,
    NamespaceStats,
    RecodeReport,
    SourceInfo,
    VerifyReport,
)
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.documents import put_document
from semkv_rag.store.upkeep.eviction import Eviction
from semkv_rag.store.upkeep.recode import recode
from semkv_rag.store.upkeep.verify import verify
from semkv_rag.store.upkeep.verify_objects import verify_objects


class KVStore(Closing):
    """Stored chunks; safe for several threads and processes that read and write at once.

    Every method that asks the index raises StoreError when it cannot be read or written, and then
    works again once it can. Reading is all that a store does whose folder cannot be written.

    Args:
        store: the folder, made when it is not there; or where the files are in an object store, its
            URL, or what `place_of` makes of it.
        index_url: SQLAlchemy URL of the index. By default SQLite, `index.sqlite` under the folder; a
            store in an object store needs one.
        read_only: write nothing, and raise StoreError when asked to.

    Attributes:
        place: where the store is.
        root: the folder, as an absolute path; of a store in an object store, the cache in front of it.
        index_url: where the index is. May hold a password.
        read_only: whether it only reads: as asked, or because the folder cannot be written.
        prompts: what is known of the chunks that are whole prompts.
        states: images' features.
        lifecycle: how long what is stored stays: limits, pins, collecting and removing.

    Raises:
        OptionError: the URL cannot be used, or has no index.
        MissingExtraError: the package for object stores is not installed.
        StoreError: the store cannot be opened.
        StoreVersionError: a newer version wrote it.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | StorePlace,
        *,
        index_url: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.place = place_of(store)
        self.root = self.place.root
        if self.place.objects is not None and index_url is None:
            raise OptionError(
                f"a store at {self.place} needs index_url: the index of all that use it, such as"
                " postgresql://user@host/semkv"
            )
        files = files_of(self.place)
        own_index = URL.create("sqlite", database=str(self.root / "index.sqlite"))
        self.index_url = index_url or str(own_index)
        try:
            if not read_only and self.place.objects is None:
                # What is stored is all tenants' prompts: not for other users of the machine to read.
                make_folder(self.root, mode=0o700)
        except OSError as error:
            raise StoreError(f"the store {self.root} cannot be made: {error.strerror}") from error
        fixed = self.place.objects is None and not os.access(self.root, os.W_OK)
        self.read_only = read_only or fixed
        self._database = Database(index_url or own_index, read_only=self.read_only)
        self._contents = Contents(files, self._database)
        self.prompts = StoredPrompts(self._database)
        self.states = StoredStates(files, self._database)
        self._eviction = Eviction(self._database, self._contents, self.states)
        self.lifecycle = Lifecycle(self._database, self._contents, self.states, self._eviction)

    def __repr__(self) -> str:
        return f"KVStore({str(self.place)!r})"

    def path(self, model: str, namespace: str, chunk_id: str, rank: int = 0) -> Path:
        """Where a chunk's file is or goes. Asks no one."""
        return paths.chunk_path(self.root, model, namespace, chunk_id, rank)

    def write_chunk(
        self,
        header: ChunkHeader,
        layers: Sequence[tuple[Tensor, Tensor]],
        sensitivity: Tensor | None = None,
    ) -> int:
        """Write a chunk's file, of one rank, where it belongs; its bytes. `add` promises it then.

        Args:
            header, layers, sensitivity: as the function `write_chunk` takes them.

        Raises:
            StoreError: they do not fit each other, or the object store fails.
            OSError: the file could not be written.
        """
        path = self.path(header.model, header.namespace, header.id, header.rank)
        return self._contents.files.write(
            path, lambda place: write_chunk(place, header, layers, sensitivity)
        )

    def open_chunk(self, model: str, namespace: str, chunk_id: str, rank: int = 0) -> ChunkFile:
        """A chunk's file, wherever it is.

        Raises:
            ChunkFileError: it is missing, torn, altered, or another model's or chunk's.
            ObjectStoreError: the object store that it is in does not answer.
        """
        path = self.path(model, namespace, chunk_id, rank)
        return self._contents.files.chunk(path, model=model, chunk_id=chunk_id)

    def add_model(self, fingerprint: str, description: Mapping[str, str]) -> None:
        """Say what a fingerprint stands for; for people to read.

        An engine says so whenever it starts: what is said already holds up no other writer.
        """
        with self._database.scanning() as connection:
            if chunks.describes(connection, fingerprint, description):
                return
        with self._database.writing(late=True) as connection:
            chunks.put_model(connection, fingerprint, description)

    def models(self) -> list[ModelInfo]:
        """The models that wrote to this store, oldest first."""
        with self._database.reading() as connection:
            return chunks.all_models(connection)

    def add(self, records: Iterable[ChunkKey], *, kept: Collection[str] = ()) -> set[str]:
        """Promise chunks whose files are on disk; the ids of those that are promised now.

        What the index holds of a chunk is read from its files' headers, so that the two cannot
        disagree: a `ChunkKey` is all that is needed. A chunk whose files are missing or not sound is
        left out.

        Args:
            kept: ids of others that make no room for these: what a document has beside them.

        Raises:
            StoreLimitError: the store's limits leave no room for some; the files of these are gone.
        """
        return self._contents.add(records, kept=kept)

    def get(
        self, model: str, namespace: str, ids: Iterable[str], *, patient: bool = False
    ) -> dict[str, ChunkRecord]:
        """The records of those of `ids` that are stored.

        With `patient` it waits for the index as long as a write does: where no request waits for it.
        """
        with self._database.scanning() if patient else self._database.reading() as connection:
            found = chunks.records(connection, ids, model, namespace)
        return {record.id: record for record in found}

    def chunks(
        self, model: str | None = None, namespace: str | None = None
    ) -> Iterator[ChunkRecord]:
        """Every chunk's record, in the order of the ids; None is any model or namespace."""
        return chain.from_iterable(self._contents.pages(model, namespace))

    def tokens(
        self, model: str, namespace: str, ids: Iterable[str], *, patient: bool = False
    ) -> dict[str, StoredTokens]:
        """The tokens of those of `ids` that are stored, as read-only arrays; `patient` as for `get`."""
        with self._database.scanning() if patient else self._database.reading() as connection:
            return chunks.tokens(connection, ids, model, namespace)

    def changes(self, model: str, since: int, namespace: str | None = None) -> Changes:
        """Which chunks of a model came and went after `since`, the `last` of an earlier answer.

        From 0 it tells all live chunks. So it does, with `reset` set, to a caller that is too far
        behind or whose index was replaced.

        Args:
            namespace: only what came and went there.
        """
        with self._database.reading() as connection:
            return feed.read(connection, model, since, namespace)

    def namespaces(self, model: str) -> list[str]:
        """The namespaces that have a chunk of a model, in their order."""
        with self._database.reading() as connection:
            return feed.namespaces(connection, model)

    def last_change(self, model: str, namespace: str) -> int:
        """A number that is another one after every chunk of a namespace that came or went."""
        with self._database.reading() as connection:
            return feed.last_of(connection, model, namespace)

    def remove(self, model: str, namespace: str, ids: Iterable[str]) -> int:
        """Remove chunks, rows first, then files; how many were there. Sources go on listing them."""
        removed = 0
        for batch in chunks.pieces(ids, FREED):
            drop = partial(self._contents.drop_ids, model, namespace, batch)
            found, gone = self._database.freeing(drop)
            unlink(self._database, self.root, gone)
            removed += found
        return removed

    def touch(self, ids: Iterable[str]) -> None:
        """Note a use of chunks, which are evicted later then. Raises as `StoredStates.touch`."""
        if not self.read_only:
            with self._database.writing(durable=False, late=True) as connection:
                chunks.touch(connection, ids, time.time())

    def evict(
        self, max_bytes: int, namespace: str | None = None, kind: str | None = None
    ) -> list[str]:
        """Remove what was unused for longest until `max_bytes` are left; the ids, as they went.

        What is pinned stays, also when that is more.

        Args:
            max_bytes: what all files together may take, of the namespace or of the whole store.
            namespace: evict only what is in it, and count only its bytes.
            kind: likewise, such as `prompt`, so that captured prompts never push out documents;
                `state` for images' features.
        """
        return [record.id for record in self._eviction.evict(max_bytes, namespace, kind)]

    def recode(
        self,
        codec: str,
        *,
        model: str | None = None,
        namespace: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> RecodeReport:
        """Convert stored chunks to another codec, in place; others may use the store meanwhile.

        A call that is killed has converted some; the next goes on.

        Args:
            model, namespace: only these; None is any.
            dry_run: only count.
            progress: called with the chunks done and all that are to be converted.

        Raises:
            OptionError: there is no such codec.
            StoreError: chunks are stored by another lossy codec: what it left out is not there.
        """
        return recode(self._database, self._contents, codec, model, namespace, dry_run, progress)

    def source(self, model: str, namespace: str, name: str) -> SourceInfo | None:
        """A document's digest and chunks, or None when it was never put."""
        with self._database.scanning() as connection:
            found = sources.find(connection, model, namespace, name)
        return found[0] if found else None

    def sources(self, model: str | None = None, namespace: str | None = None) -> list[SourceInfo]:
        """The documents, by name; None is any model or namespace."""
        with self._database.scanning() as connection:
            return sources.find(connection, model, namespace)

    def sources_of(self, model: str, namespace: str, ids: Collection[str]) -> dict[str, str]:
        """The document of each of some chunks that are one's; of several, the first by name."""
        with self._database.reading() as connection:
            return sources.listing(connection, model, namespace, ids)

    def put_source(
        self, model: str, namespace: str, name: str, digest: str, chunk_ids: Sequence[str]
    ) -> int:
        """Put a document in place of the one of that name.

        Its former chunks that no source lists any more are removed; how many that were.
        """
        return put_document(
            self._database, self._contents, model, namespace, name, digest, chunk_ids
        )

    def remove_source(self, model: str, namespace: str, name: str) -> int:
        """Remove a document and the chunks that no other source lists; how many that were."""
        return self.lifecycle.remove(model, namespace, [name]).chunks

    def stats(self, namespace: str | None = None) -> list[NamespaceStats]:
        """Counts and bytes of each model and namespace that has something stored."""
        with self._database.scanning() as connection:
            return states.with_states(connection, namespace, chunks.stats(connection, namespace))

    def verify(
        self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read every promised file and compare it with its checksums and the index, beside others' use.

        Temporary files of writers that were killed are removed once they are old.

        Args:
            repair: drop the chunks and states whose files are missing or damaged, put right what the
                index says, promise the sound files that it does not know, and remove what is of no use.
            progress: called with the chunks done and all of them.
        """
        return self._verify(repair=repair, tensors=True, progress=progress)

    def rebuild_index(self, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Make the index agree with the headers of the files; make it when it is gone.

        Models' descriptions and sources stand only in the index: when it was lost they come back
        with the next precompute, which finds the chunks and computes nothing.
        """
        self._database.create()
        return self._verify(repair=True, tensors=False, progress=progress)

    def _verify(self, **how: Any) -> VerifyReport:
        check = verify if self.place.objects is None else verify_objects
        return check(self._database, self._contents, self.states, **how)

    def close(self) -> None:
        """Close the index; may be called again. The store then raises StoreError."""
        self._contents.files.close()
        self._database.close()
