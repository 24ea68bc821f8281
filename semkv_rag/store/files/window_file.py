"""Window files: a namespace's chunks as the matcher looks for them, so that opening reads no tokens.

It is a file of tensors like the others, one for each model and namespace, and is replaced as a whole. It
may be lost at any time: it is made again from the index. Whatever it says is compared with the stored
tokens. So an old file serves, too: it names the change that it ends with, and later ones are added.
docs/store.md is the specification.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from semkv_rag.errors import StoreError
from semkv_rag.reuse.base import SECTIONS
from semkv_rag.store.files.finite import raw_bytes
from semkv_rag.store.files.tensor_file import TensorEntry, TensorFile
from semkv_rag.store.files.tensor_format import FileFormat
from semkv_rag.store.files.tensor_writer import write_tensors

FORMAT: Final = FileFormat("semkv.windows", 1, "window file", StoreError)

_MOST_BYTES: Final = 5 << 30
"""More than the windows of a segment can take: nobody reads a forged file of terabytes."""


def write_windows(
    path: Path, model: str, namespace: str, last_change: int, sections: Mapping[str, NDArray[Any]]
) -> int:
    """Write a window file so that it is there whole or not at all; its size in bytes.

    Args:
        path: where it goes, see `paths.window_path`; a file there is replaced.
        last_change: the number of the last change of the store that it has taken in.
        sections: see `reuse.base.packed`.

    Raises:
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    metadata = {"model": model, "namespace": namespace, "last_change": str(last_change)}
    tensors = {
        name: torch.from_numpy(np.require(sections[name], requirements=("C", "W")).view(np.uint8))
        for name in SECTIONS
    }
    return write_tensors(path, FORMAT, metadata, tensors)


class WindowFile(TensorFile):
    """A window file, open for reading: `reuse.base.Sections`. May be used by several threads at once.

    Args:
        path: the file.
        model, namespace: whose it must be.

    Attributes:
        last_change: the number of the last change of the store that it has taken in.
        path: the file.
        size_bytes: its size.

    Raises:
        StoreError: it is missing, torn, altered, or another namespace's.
        StoreVersionError: a newer version wrote it.
    """

    FORMAT = FORMAT

    last_change: int

    def __init__(self, path: str | os.PathLike[str], model: str, namespace: str) -> None:
        self._owner = (model, namespace)
        super().__init__(path)

    def size(self, name: str) -> int:
        """Bytes of a section."""
        entry = self._entries[name]
        return entry.end - entry.begin

    def load(self, name: str) -> memoryview:
        """A whole section, its checksum compared."""
        return raw_bytes(self._tensor(name))

    def read(self, name: str, offset: int, count: int) -> bytes:
        """`count` bytes of a section from `offset` on. Their checksum is not compared."""
        entry = self._entries[name]
        begin = entry.begin + offset
        if not entry.begin <= begin <= begin + count <= entry.end:
            raise self._error(f"has no such place in {name}")
        try:
            content = os.pread(self._file.fileno(), count, self._data_begin + begin)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise self._error(f"cannot be read: {error}") from error
        if len(content) != count:
            raise self._error("is torn: it ends before its header says")
        return content

    def _check_entries(
        self, metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        if tuple(entries) != SECTIONS:
            raise self._unusable("its sections are not those of a window file")
        if any(entry.dtype != torch.uint8 or len(entry.shape) != 1 for entry in entries.values()):
            raise self._unusable("its sections are not bytes")
        if self.size_bytes > _MOST_BYTES:
            raise self._unusable("it is larger than any window file")

    def _take_header(self, metadata: Mapping[str, str]) -> None:
        try:
            owner = metadata["model"], metadata["namespace"]
            self.last_change = int(metadata["last_change"])
        except (KeyError, ValueError) as error:
            raise self._unusable(f"its header cannot be understood: {error!r}") from error
        if owner != self._owner:
            raise self._error("belongs to another model or namespace")
