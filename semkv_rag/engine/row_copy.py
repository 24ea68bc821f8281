"""Copies of K and V that a thread makes beside the model.

What a layer of a model that runs eagerly hands to its attention is not changed afterwards: the copy may
be made while the next layers compute. On a CPU that is done by another thread, so that the model
waits for as little as possible; a GPU copies beside the model by itself. A compiled model may put
something else into the same memory, so there the model waits.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import BoundedSemaphore

import numpy as np
import torch
from torch import Tensor

from semkv_rag.engine.threads import pool_beside_model

UNDER_WAY = 8
"""Copies that may wait: each holds memory that the model would otherwise use again."""
WORTH_BYTES = 128 << 10
"""Of K: a smaller copy takes less time than handing it over."""

Pair = tuple[Tensor, Tensor]
"""A layer's K and V."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class RowCopier:
    """One per worker. Called by the worker's own thread.

    Args:
        eager: whether the model runs eagerly.
    """

    def __init__(self, eager: bool) -> None:
        self._eager = eager
        self._thread = pool_beside_model(1, "semkv-copy")
        self._free = BoundedSemaphore(UNDER_WAY)

    def copy(self, into: Pair, rows: Pair) -> Future[None] | None:
        """Copy a layer's K and V, each [tokens, kv_heads, head_dim], into memory of the same kind.

        Returns:
            Done once the copies are made; None when they are already, or a GPU's stream has them.
        """
        keys, _ = rows
        beside = self._eager and keys.device.type == "cpu" and keys.nbytes >= WORTH_BYTES
        if not beside or not self._free.acquire(blocking=False):
            for kept, fresh in zip(into, rows, strict=True):
                kept.copy_(fresh)
            return None
        return self._thread.submit(self._copy, into, rows)

    def _copy(self, into: Pair, rows: Pair) -> None:
        try:
            # NumPy copies in this one thread; PyTorch would start a team, on the model's cores.
            for kept, fresh in zip(into, rows, strict=True):
                np.copyto(_array(kept), _array(fresh))
        finally:
            self._free.release()

    def close(self) -> None:
        """Finish the copies under way."""
        self._thread.shutdown(wait=True)


def _array(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The tensor's memory, its values as integers: NumPy has no bfloat16."""
    return tensor.view(_SAME_SIZE[tensor.element_size()]).numpy()
