"""Host memory that captured KV is copied into, bounded, and kept for the next capture.

The copy stands in the model's way. On a CPU most of its time would go into pages that the system has
to hand out for the first time; memory that was used before takes half as long. On a GPU the memory is
pinned, so that the device copies into it while the model goes on; the device itself has none to spare.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Condition

import torch
from torch import Tensor

KEPT_BYTES = 256 << 20
MOST_BYTES = 2 << 30
"""Bytes of all captures under way. A capture beyond them waits, or is not made."""
STEPS = 8
"""Sizes from one power of two to the next: memory fits captures of about the same length."""


class CaptureMemory:
    """Host memory that captures share; one per worker, safe for threads."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._kept = self._taken = 0
        self._changed = Condition()

    def has_room(self, patience_s: float) -> bool:
        """Whether captures take less than `MOST_BYTES`, or do so before the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._taken < MOST_BYTES, patience_s)

    def take(self, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor of this shape on the CPU, of the dtype of `like`; to be given back.

        Raises:
            RuntimeError: the system does not have it, or it cannot be pinned.
        """
        wanted = shape.numel()
        size = _rounded(wanted)
        with self._changed:
            free = self._free[size, like.dtype]
            flat = free.pop() if free else None
            if flat is not None:
                self._kept -= flat.nbytes
        if flat is None:
            flat = torch.empty(size, dtype=like.dtype, pin_memory=like.device.type != "cpu")
        with self._changed:
            self._taken += flat.nbytes
        return flat[:wanted].view(shape)

    def give(self, tensor: Tensor) -> None:
        """Take back what nobody uses any more."""
        flat = tensor.as_strided((_rounded(tensor.numel()),), (1,))
        with self._changed:
            self._taken -= flat.nbytes
            if self._kept + flat.nbytes <= KEPT_BYTES:
                self._free[len(flat), flat.dtype].append(flat)
                self._kept += flat.nbytes
            self._changed.notify_all()


def _rounded(size: int) -> int:
    step = max(1, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step
