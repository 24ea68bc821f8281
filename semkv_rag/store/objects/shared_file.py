"""Chunk and state files whose bytes are in the local folder, or on their way there.

A damaged file in the folder is removed and fetched anew, once. If the object store's file is damaged,
too, the file counts as damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from semkv_rag.errors import ChunkFileError, StateFileError
from semkv_rag.store.codecs import EncodedLayer
from semkv_rag.store.files.chunk_file import ChunkFile
from semkv_rag.store.files.state_file import StateFile
from semkv_rag.store.files.tensor_file import TensorFile
from semkv_rag.store.objects.landing import FileWait, Landing

_DAMAGED = (ChunkFileError, StateFileError)

Result = TypeVar("Result")


class Origin(Protocol):
    """Where files come from, as `SharedFiles` has it."""

    def fetch(self, path: Path, wait: FileWait) -> Landing:
        """A file on its way."""

    def drop(self, path: Path) -> None:
        """Remove a file from the folder."""

    def used(self, descriptor: int) -> None:
        """Note that a file of the folder was used."""


class _SharedFile(TensorFile):
    """What chunk and state files have in common.

    Args:
        origin: where it comes from.
        wait: of whoever reads it.
        named: the arguments of the class that checks the file.
    """

    def __init__(self, path: Path, *, origin: Origin, wait: FileWait, **named: Any) -> None:
        self._origin, self._wait, self._named = origin, wait, named
        self._mending = threading.Lock()
        self._landing = wait.landings.get(path)
        if self._landing is None:
            try:
                super().__init__(path, **named)
            except _DAMAGED:  # or missing
                origin.drop(path)
            else:
                origin.used(self._file.fileno())
                return
            self._landing = origin.fetch(path, wait)
        self._open_landing(path)

    def _open_landing(self, path: Path) -> None:
        super().__init__(path, **self._named)
        self._identity = None  # it is still being written

    def _descriptor(self) -> int:
        if self._landing is None:
            return super()._descriptor()
        try:
            return self._landing.duplicate(self._wait)
        except FileNotFoundError as fault:
            raise self._error("is missing in the object store") from fault

    def _read(self, offset: int, buffer: memoryview) -> None:
        if self._landing is not None:
            try:
                self._landing.require(offset, offset + len(buffer), self._wait)
            except FileNotFoundError as fault:
                raise self._error("is missing in the object store") from fault
        super()._read(offset, buffer)

    def _mended(self, read: Callable[[], Result]) -> Result:
        """What is read; where the file turns out damaged, of the object itself."""
        try:
            return read()
        except _DAMAGED:
            if self._file.closed:
                raise
            self._origin.drop(self.path)
            with self._mending:
                if self._landing is not None:
                    raise
                self._landing = self._origin.fetch(self.path, self._wait)
                damaged = self._file
                self._open_landing(self.path)
                damaged.close()
        return read()

    def verify(self) -> None:
        self._mended(super().verify)


class SharedChunkFile(_SharedFile, ChunkFile):
    """A chunk's file; opened and read as `ChunkFile`.

    Raises:
        ObjectStoreError: it does not come from the object store, or not in time.
    """

    def encoded(self, index: int) -> EncodedLayer:
        return self._mended(lambda: super(SharedChunkFile, self).encoded(index))

    def layers_in(
        self, memory: Tensor, begin: int, end: int
    ) -> tuple[list[EncodedLayer], Tensor | None]:
        return self._mended(lambda: super(SharedChunkFile, self).layers_in(memory, begin, end))

    def sensitivity(self) -> Tensor | None:
        return self._mended(super().sensitivity)


class SharedStateFile(_SharedFile, StateFile):
    """An image's features; opened and read as `StateFile`.

    Raises:
        ObjectStoreError: it does not come from the object store, or not in time.
    """

    def state(self) -> Tensor:
        return self._mended(super().state)
