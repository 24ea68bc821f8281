"""Memory that captured KV is copied into, kept for the next capture.

The copy stands in the model's way. On a CPU most of its time would go into pages that the system has
to hand out for the first time; memory that was used before takes half as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from threading import Lock

import torch
from torch import Tensor

KEPT_BYTES = 256 << 20
ROWS = 64
"""Tensors have rows in multiples of it, so that they fit the next capture."""


class CaptureMemory:
    """One per worker; safe for threads. A GPU's memory is kept by torch itself."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._kept = 0
        self._lock = Lock()

    def take(self, rows: int, like: Tensor) -> Tensor:
        """Memory for `rows` rows such as those of `like`, [at least rows, kv_heads, head_dim]."""
        if like.device.type != "cpu":
            return like.new_empty((rows, *like.shape[1:]))
        shape = torch.Size((-(-rows // ROWS) * ROWS, *like.shape[1:]))
        with self._lock:
            if free := self._free[shape, like.dtype]:
                tensor = free.pop()
                self._kept -= tensor.nbytes
                return tensor
        return like.new_empty(shape)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take back what nobody uses any more."""
        with self._lock:
            for tensor in tensors:
                if tensor.device.type == "cpu" and self._kept + tensor.nbytes <= KEPT_BYTES:
                    self._free[tensor.shape, tensor.dtype].append(tensor)
                    self._kept += tensor.nbytes
