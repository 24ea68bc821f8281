"""The files of a store that are in an object store, and in a local folder in front of it.

A file is written to the folder, then to the object store, and promised by the index only then. It is read
from the folder; what is not there comes from the object store and is kept. A folder that is full, or
cannot be written, is no obstacle: what is written goes through memory, and so does what is read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store.files.beneath import file_bytes, open_file
from semkv_rag.store.files.chunk_file import ChunkFile
from semkv_rag.store.files.paths import ALWAYS, Identity
from semkv_rag.store.files.state_file import StateFile
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.objects.cache import LocalCache
from semkv_rag.store.objects.fetching import Fetching
from semkv_rag.store.objects.landing import FileWait, Landing
from semkv_rag.store.objects.objects import Objects
from semkv_rag.store.objects.shared_file import SharedChunkFile, SharedStateFile
from semkv_rag.store.place import ObjectPlace, StorePlace

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0
"""How late a file may be for which no request waits."""
_MEMORY: Final = "/dev/shm"  # noqa: S108 - a folder of our own is made in it


class SharedFiles(LocalFiles):
    """See the module's docstring.

    Args:
        root: the local folder.
        place: where the objects are, and what the folder may take.
        on_thread: called first in each thread that is started here.

    Attributes:
        objects: the object store.
        cache: the local folder.
    """

    in_object_store = True

    def __init__(
        self, root: Path, place: ObjectPlace, on_thread: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(root)
        self.objects = Objects(place.url)
        self.objects.require()
        self.cache = LocalCache(root, place.cache_bytes)
        self._timeout_s = place.fetch_timeout_ms / 1000
        self._fetching = Fetching(self.objects, self.cache, root, on_thread)

    def wait(self, timeout_s: float | None = None) -> FileWait:
        """A request's wait for its files, bounded as the place says, or otherwise."""
        return self._fetching.wait(self._timeout_s if timeout_s is None else timeout_s)

    def expect(self, paths: Sequence[Path], wait: FileWait) -> None:
        """Have those files fetched that are not in the folder; returns at once.

        The wait begins then. While the object store is left alone, whoever opens a file is told.
        """
        with suppress(ObjectStoreError):
            for path in paths:
                if file_bytes(path) is None:
                    self.fetch(path, wait)

    def chunk(
        self,
        path: Path,
        *,
        model: str | None,
        chunk_id: str | None = None,
        wait: FileWait | None = None,
    ) -> ChunkFile:
        """A chunk's file, from the folder or the object store.

        Args:
            wait: of the request that wants it; bounded as for upkeep unless given.
        """
        wait = wait or self.wait(PATIENCE_S)
        return SharedChunkFile(path, origin=self, wait=wait, model=model, chunk_id=chunk_id)

    def object_of_chunk(self, path: Path, *, model: str | None = None) -> ChunkFile:
        """A chunk's file out of the object store, whatever is in the folder; for checking."""
        wait = self.wait(PATIENCE_S)
        self._fetching.fetch_apart(path, wait)
        return SharedChunkFile(path, origin=self, wait=wait, model=model)

    def object_of_state(self, path: Path, *, model: str | None = None) -> StateFile:
        """The same of an image's features."""
        wait = self.wait(PATIENCE_S)
        self._fetching.fetch_apart(path, wait)
        return SharedStateFile(path, origin=self, wait=wait, model=model)

    def state(
        self,
        path: Path,
        *,
        model: str | None,
        state_id: str | None = None,
        for_request: bool = False,
    ) -> StateFile:
        """An image's features, from the folder or the object store."""
        wait = self.wait(None if for_request else PATIENCE_S)
        return SharedStateFile(path, origin=self, wait=wait, model=model, state_id=state_id)

    def may_be(self, path: Path) -> bool:
        return True

    def forget(self, path: Path) -> bool:
        there = file_bytes(path) is not None
        self.cache.drop(path)
        return there and file_bytes(path) is None

    def write(self, path: Path, make: Callable[[Path], int]) -> int:
        try:
            size = make(path)
            self.cache.count_arrival(size)
            with os.fdopen(open_file(path), "rb") as file:
                self._put(path, file)
            return size
        except OSError as error:
            logger.info("semkv: %s is not kept in the local folder: %s", path.name, error)
        folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="semkv-", dir=folder) as made:
            place = Path(made) / path.name
            size = make(place)
            with place.open("rb") as file:
                self._put(path, file)
        return size

    def sizes(self, paths: Sequence[Path]) -> list[int | None]:
        return self.objects.sizes([self.key(path) for path in paths])

    def seen(self, path: Path) -> Identity | None:
        return ALWAYS  # asked of the object store only when it is removed

    def remove(self, paths: Sequence[tuple[Path, Identity]]) -> bool:
        for path, _ in paths:
            self.cache.drop(path)
        try:
            self.objects.delete([self.key(path) for path, _ in paths])
        except ObjectStoreError as error:
            logger.warning("semkv: %d objects are not deleted now: %s", len(paths), error)
            return False
        return True

    def close(self) -> None:
        self._fetching.close()

    # ---- what a file asks its origin -------------------------------------------------------

    def fetch(self, path: Path, wait: FileWait) -> Landing:
        return self._fetching.fetch(path, wait)

    def drop(self, path: Path) -> None:
        self.cache.drop(path)

    def used(self, descriptor: int) -> None:
        self.cache.used(descriptor)

    def _put(self, path: Path, file: IO[bytes]) -> None:
        self.objects.put(self.key(path), file)


def files_of(place: StorePlace, on_thread: Callable[[], None] = lambda: None) -> LocalFiles:
    """A store's files.

    Raises:
        MissingExtraError: they are in an object store, and the package for it is not installed.
        ObjectStoreError: the credentials for it are missing.
    """
    if place.objects is None:
        return LocalFiles(place.root)
    return SharedFiles(place.root, place.objects, on_thread)
