"""A window file's sections in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from semkv_rag.reuse import ChunkIndex
from semkv_rag.reuse.base import Base

from .shelf import Shelf


class InMemory:
    """`reuse.base.Sections`, with a count of what is read."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.bytes = {name: bytearray(array.tobytes()) for name, array in arrays.items()}
        self.reads = 0

    def size(self, name: str) -> int:
        return len(self.bytes[name])

    def load(self, name: str) -> memoryview:
        return memoryview(bytes(self.bytes[name]))

    def read(self, name: str, offset: int, count: int) -> bytes:
        assert 0 <= offset <= offset + count <= self.size(name), "nothing is read from elsewhere"
        self.reads += 1
        return bytes(self.bytes[name][offset : offset + count])


def packed(index: ChunkIndex) -> InMemory:
    """What an index packs, which must not be nothing."""
    arrays = index.pack()()
    assert arrays is not None
    return InMemory(arrays)


def rebased(shelf: Shelf, window: int = 8) -> Shelf:
    """The same chunks, on a base of all of them."""
    other = Shelf(window)
    other.chunks = shelf.chunks
    base = Base(packed(shelf.index), window)
    other.index = ChunkIndex(other.tokens_of, window=window, base=base)
    return other
