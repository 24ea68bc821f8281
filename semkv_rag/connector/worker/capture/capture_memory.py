"""Memory that captured KV is copied into, kept for the next capture.

The copy stands in the model's way. On a CPU most of its time would go into pages that the system has
to hand out for the first time; memory that was used before takes half as long.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

import torch
from torch import Tensor

KEPT_BYTES = 256 << 20
STEPS = 8
"""Sizes from one power of two to the next: memory fits captures of about the same length."""


class CaptureMemory:
    """One per worker; safe for threads. A GPU's memory is kept by torch itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._kept = 0
        self._lock = Lock()

    def take(self, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor of this shape, of the dtype of `like` and on its device."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        wanted = shape.numel()
        size = _rounded(wanted)
        with self._lock:
            free = self._free[size, like.dtype]
            flat = free.pop() if free else None
            if flat is not None:
                self._kept -= flat.nbytes
        if flat is None:
            flat = like.new_empty(size)
        return flat[:wanted].view(shape)

    def give(self, tensor: Tensor) -> None:
        """Take back what nobody uses any more."""
        if tensor.device.type != "cpu":
            return
        flat = tensor.as_strided((_rounded(tensor.numel()),), (1,))
        with self._lock:
            if self._kept + flat.nbytes <= KEPT_BYTES:
                self._free[len(flat), flat.dtype].append(flat)
                self._kept += flat.nbytes


def _rounded(size: int) -> int:
    step = max(1, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step
