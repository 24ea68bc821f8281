"""A store's files, wherever they are: what opens, writes and removes them.

`LocalFiles` are those of a folder. `semkv_rag.store.objects` has those of an object store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from semkv_rag.store.files.beneath import file_bytes, remove_if_possible, status
from semkv_rag.store.files.chunk_file import ChunkFile
from semkv_rag.store.files.paths import Identity, identity
from semkv_rag.store.files.state_file import StateFile


class LocalFiles:
    """Files of a folder.

    Attributes:
        root: the folder; the files' paths are below it.
        in_object_store: whether they are objects, which others write and delete as well.
    """

    in_object_store = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def chunk(self, path: Path, *, model: str | None, chunk_id: str | None = None) -> ChunkFile:
        """A chunk's file, opened as `ChunkFile`."""
        return ChunkFile(path, model=model, chunk_id=chunk_id)

    def state(
        self,
        path: Path,
        *,
        model: str | None,
        state_id: str | None = None,
        for_request: bool = False,
    ) -> StateFile:
        """A state's file, opened as `StateFile`.

        Args:
            for_request: whether a request waits for it.
        """
        return StateFile(path, model=model, state_id=state_id)

    def may_be(self, path: Path) -> bool:
        """Whether a file may be there; False when it surely is not. Waits for nothing."""
        return status(path) is not None

    def forget(self, path: Path) -> bool:
        """Remove a copy of a file that stands elsewhere; whether there was one."""
        return False

    def write(self, path: Path, make: Callable[[Path], int]) -> int:
        """Write a file; its bytes. It is there when this returns.

        Args:
            make: writes it to a place.

        Raises:
            OSError, StoreError: it could not be written.
        """
        return make(path)

    def sizes(self, paths: Sequence[Path]) -> list[int | None]:
        """Files' bytes; None for one that is not there.

        Raises:
            ObjectStoreError: nobody knows.
        """
        return [file_bytes(path) for path in paths]

    def seen(self, path: Path) -> Identity | None:
        """What tells a file that is to be removed from one that is written meanwhile; None when there is
        none."""
        return identity(path)

    def key(self, path: Path) -> str:
        """A file's name in the store."""
        return str(path.relative_to(self.root))

    def remove(self, paths: Sequence[tuple[Path, Identity]]) -> bool:
        """Remove files that are still as they were seen. What cannot be removed stays.

        Returns:
            Whether the object store has done it; True of files.
        """
        for path, seen in paths:
            if identity(path) == seen:
                remove_if_possible(path)
        return True

    def close(self) -> None:
        """Nothing is open."""
