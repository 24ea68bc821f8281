"""What kernels of ours need of a cache: numbers at even distances, on a device that Triton runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from vllm.triton_utils import HAS_TRITON

from semkv_rag.connector.worker.model.block_layout import BlockLayout, Places
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV


@dataclass(frozen=True)
class Strides:
    """Where a number of K, or of V, stands in a layer's cache, counted in numbers from its first one."""

    first: int
    block: int
    token: int
    head: int
    dim: int


def require_triton(layers: Sequence[Layer], paged: PagedKV) -> None:
    """Raise NotImplementedError where our kernels do not run, or not for these layers."""
    if any(layer.by_token for layer in layers):
        raise NotImplementedError("latents")
    if not HAS_TRITON or paged.device.type == "cpu":
        raise NotImplementedError("Triton does not run here")


def strides_of(layout: BlockLayout, paged: PagedKV) -> tuple[Strides, Strides]:
    """Where K and V of a layer stand.

    Raises:
        NotImplementedError: in 8 bits, or not at even distances.
    """
    if layout.kept.itemsize == 1:
        raise NotImplementedError("a cache of 8 bits")
    cache = layout.attention.kv_cache
    keys, values = (even_strides(places, cache, paged) for places in (layout.keys, layout.values))
    return keys, values


def even_strides(places: Places, cache: Tensor, paged: PagedKV) -> Strides:
    """Where K or V of a layer stands.

    Raises:
        NotImplementedError: not at even distances.
    """
    where = paged.offsets(cache, places.numbers)
    first = int(where[0, 0, 0])
    token, head, dim = (
        int(np.take(where, min(1, size - 1), axis).flat[0]) - first
        for axis, size in enumerate(places.shape)
    )
    tokens, heads, dims = np.ix_(*(np.arange(size) for size in places.shape))
    if not np.array_equal(first + tokens * token + heads * head + dims * dim, where):
        raise NotImplementedError("a cache whose numbers do not stand at even distances")
    return Strides(first, paged.block_stride(cache), token, head, dim)
