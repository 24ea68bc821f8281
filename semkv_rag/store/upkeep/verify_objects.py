"""Checking a store whose files are in an object store, and mending what is wrong.

Objects are checked as they are there, whatever is in this machine's folder. An object that the index does
not promise may be another writer's, who is about to promise it; once it is an hour old nobody is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from semkv_rag.errors import ObjectStoreError, SemKVError
from semkv_rag.reuse.tokens import StoredTokens
from semkv_rag.store.files.beneath import CHUNKS_FOLDER, STATES_FOLDER
from semkv_rag.store.files.paths import chunk_path, chunk_paths, id_in_name, state_path, state_paths
from semkv_rag.store.gone import BATCH, GoneFile, promised, unlink
from semkv_rag.store.index import chunks, states
from semkv_rag.store.index.database import Database
from semkv_rag.store.objects.objects import ObjectInfo
from semkv_rag.store.objects.shared_files import SharedFiles
from semkv_rag.store.records import ChunkKey, ChunkRecord, StateRecord, VerifyReport
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.findings import Verification
from semkv_rag.store.upkeep.verify import DEBRIS_AGE_S, disagreement

NO_IDENTITY: Final = (0, 0, 0)


def verify_objects(
    database: Database,
    contents: Contents,
    stored_states: StoredStates,
    *,
    repair: bool,
    tensors: bool,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """As `verify`; without reading the tensors it takes in what the index does not know.

    Raises:
        ObjectStoreError: the object store fails: what was found until then is lost, and mended.
    """
    if repair:
        database.require_writing()
    run = _Run(database, contents, stored_states, repair=repair, tensors=tensors, progress=progress)
    run.check_feed()
    run.check_chunks()
    run.check_states()
    run.check_unknown()
    return run.report()


class _Run(Verification):
    @property
    def _files(self) -> SharedFiles:
        files = self._contents.files
        assert isinstance(files, SharedFiles)
        return files

    def check_chunks(self) -> None:
        """Every chunk's row: its objects are there and sound, and say what the index does."""
        with self._database.scanning() as connection:
            total = sum(entry.chunks for entry in chunks.stats(connection, None))
        for page in self._contents.pages(None, None):
            for record in page:
                self._check_chunk(record)
                self.chunks += 1
                if self._progress:
                    self._progress(self.chunks, max(total, self.chunks))

    def check_states(self) -> None:
        """The same of images' features."""
        for record in self._states.records():
            self._check_state(record)
            self.states += 1

    def check_unknown(self) -> None:
        """Every object that the index does not promise."""
        for folder in (CHUNKS_FOLDER, STATES_FOLDER):
            for infos in chunks.pieces(self._files.objects.list(folder), BATCH):
                self._check_unknown(folder, infos)

    def _check_chunk(self, record: ChunkRecord) -> None:
        paths = chunk_paths(self._root, record, record.ranks)
        sizes = self._files.sizes(paths)
        if not paths or None in sizes:
            place = paths[sizes.index(None)] if paths else None
            self._broken_chunk(record, "missing", place, "is not in the object store")
            return
        total = sum(filter(None, sizes))
        if total != record.bytes:
            self._notice("stale", paths[0], "the index says another size")
            if self._repair:
                self._contents.add([record], mending=True)
        if self._tensors:
            stored = self._tokens(record)
            for rank, path in enumerate(paths):
                try:
                    with self._files.object_of_chunk(path, model=record.model) as file:
                        file.verify()
                        text = disagreement(record, stored, file.header, rank)
                        if file.header.id != record.id:
                            text = "it holds another chunk"
                except ObjectStoreError:
                    raise
                except SemKVError as error:
                    text = str(error)
                if text is not None:
                    self._broken_chunk(record, "damaged", path, text)
                    return
        self.bytes += total

    def _check_state(self, record: StateRecord) -> None:
        paths = state_paths(self._root, record)
        if not paths or self._files.sizes(paths) == [None]:
            place = paths[0] if paths else None
            self._broken_state(record, "missing", place, "is not in the object store")
            return
        if self._tensors:
            try:
                with self._files.object_of_state(paths[0], model=record.model) as file:
                    file.verify()
            except ObjectStoreError:
                raise
            except SemKVError as error:
                self._broken_state(record, "damaged", paths[0], str(error))
                return
        self.bytes += record.bytes

    def _tokens(self, record: ChunkRecord) -> StoredTokens | None:
        with self._database.scanning() as connection:
            found = chunks.tokens(connection, [record.id], record.model, record.namespace)
        return found.get(record.id)

    def _broken_chunk(self, record: ChunkRecord, kind: str, place: Path | None, text: str) -> None:
        def drop(connection: Connection) -> list[GoneFile] | None:
            now = chunks.find(connection, [record.id])
            if not now:
                return None  # it was removed meanwhile
            return self._contents.drop(connection, now) if self._repair else []

        self._broken(drop, kind, place, text)

    def _broken_state(self, record: StateRecord, kind: str, place: Path | None, text: str) -> None:
        def drop(connection: Connection) -> list[GoneFile] | None:
            now = states.find(connection, [record.id])
            if not now:
                return None
            return self._states.drop(connection, now) if self._repair else []

        self._broken(drop, kind, place, text)

    def _broken(
        self,
        drop: Callable[[Connection], list[GoneFile] | None],
        kind: str,
        place: Path | None,
        text: str,
    ) -> None:
        gone = self._locked(drop)
        if gone is None:
            return
        unlink(self._database, self._root, gone)
        self._problem(kind, place, text)

    def _check_unknown(self, folder: str, infos: Sequence[ObjectInfo]) -> None:
        by_path = {self._root / info.key: info for info in infos}
        ids = {id_ for path in by_path if (id_ := id_in_name(path))}
        with self._database.scanning() as connection:
            kept = promised(connection, self._root, ids)
        gone = []
        for path, info in by_path.items():
            if path in kept:
                continue
            if not self._tensors:
                self._take_in_object(folder, path)
            elif info.age_s > DEBRIS_AGE_S:
                self._notice("debris", path, "not in the index, and older than an hour")
                gone.append(GoneFile(id_in_name(path) or "", path, NO_IDENTITY, self._files))
            else:
                self._notice("orphan", path, "not in the index; its writer may be about to say so")
        if self._repair and gone:
            unlink(self._database, self._root, gone)

    def _take_in_object(self, folder: str, path: Path) -> None:
        """Promise a sound object; one that stands for several ranks is promised with the last."""
        try:
            if folder == STATES_FOLDER:
                with self._files.object_of_state(path) as state:
                    owner = state.header
                if state_path(self._root, owner.model, owner.namespace, owner.id) == path:
                    self._notice("orphan", path, "sound, and not in the index")
                    self._states.promise([path], mending=True)
                return
            with self._files.object_of_chunk(path) as chunk:
                header = chunk.header
            place = chunk_path(self._root, header.model, header.namespace, header.id, header.rank)
            if place == path:
                self._notice("orphan", path, "sound, and not in the index")
                key = ChunkKey(header.id, header.model, header.namespace)
                self._contents.add([key], mending=True)
        except ObjectStoreError:
            raise
        except SemKVError as error:
            self._notice("debris", path, str(error))
