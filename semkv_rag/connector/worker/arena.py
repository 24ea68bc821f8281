"""Memory of a fixed size, handed out in contiguous pieces."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

ALIGNMENT = 64
"""Pieces begin at multiples of it, as tensors that torch allocates do."""


class Arena:
    """Not safe for threads.

    All of it is taken from the system at once: memory that the system hands out for the first time
    takes several times as long to write as memory that was written before, and a device's copies need
    memory that was pinned.

    Args:
        size_bytes: of all of it.
        pinned: whether a device copies from it.

    Attributes:
        size_bytes: as given.
        memory: [size_bytes], uint8.

    Raises:
        MemoryError: the system does not have it, or it cannot be pinned.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        try:
            # Not torch's pinned memory, which is rounded up to a power of two.
            self.memory = torch.empty(size_bytes, dtype=torch.uint8).zero_()
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        if pinned:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            fault = cuda.cudaHostRegister(self.memory.data_ptr(), size_bytes, 0)
            if fault.value != 0:
                raise MemoryError(f"it cannot be pinned: {fault}")
        self._free = [(0, size_bytes)]  # begin and end of each hole, in order; no two touch

    def take(self, size_bytes: int) -> int | None:
        """Where a free piece of this size begins, which is taken from now on; None when there is none."""
        size = rounded(size_bytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if begin + size < end else []
                return begin
        return None

    def would_fit(self, size_bytes: int, pieces: Iterable[tuple[int, int]]) -> bool:
        """Whether a piece of this size could be taken once others were given back.

        Args:
            pieces: where each of the others begins, and its size in bytes.
        """
        given = ((begin, begin + rounded(size)) for begin, size in pieces)
        start = last = 0
        for begin, end in sorted([*self._free, *given]):
            start, last = (start if begin == last else begin), end
            if last - start >= rounded(size_bytes):
                return True
        return False

    @property
    def used_bytes(self) -> int:
        """What the pieces that were handed out take."""
        return self.size_bytes - sum(end - begin for begin, end in self._free)

    def give(self, begin: int, size_bytes: int) -> None:
        """Take back a piece."""
        end = begin + rounded(size_bytes)
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


def rounded(size_bytes: int) -> int:
    """What a piece of a size takes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
