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
"""A smaller copy takes less time than handing it over."""

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

    def copy(self, into: Tensor, rows: Tensor) -> Future[None] | None:
        """Copy `rows` into memory of the same shape and type; both [tokens, kv_heads, head_dim].

        Returns:
            Done once the copy is made; None when it is already, or a GPU's stream has it.
        """
        beside = self._eager and rows.device.type == "cpu" and rows.nbytes >= WORTH_BYTES
        if not beside or not self._free.acquire(blocking=False):
            into.copy_(rows)
            return None
        # NumPy copies in this one thread; PyTorch would start a team of threads, on the model's cores.
        future = self._thread.submit(np.copyto, _array(into), _array(rows))
        future.add_done_callback(lambda _: self._free.release())
        return future

    def close(self) -> None:
        """Finish the copies under way."""
        self._thread.shutdown(wait=True)


def _array(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The tensor's memory, its values as integers: NumPy has no bfloat16."""
    return tensor.view(_SAME_SIZE[tensor.element_size()]).numpy()
