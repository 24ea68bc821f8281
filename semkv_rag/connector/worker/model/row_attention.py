"""Attention of scattered tokens by a kernel of our own, where Triton runs; see `row_kernel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.triton_utils import HAS_TRITON

from semkv_rag.connector.worker.model.block_layout import BlockLayout, Places
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.replaced import Forward, replaced
from semkv_rag.connector.worker.model.row_tiles import Rows, Strides, tile_rows
from semkv_rag.connector.worker.model.slice import Slice


class RowAttention:
    """Takes the place of the backend's attention in the blends' forwards.

    Raises:
        NotImplementedError: the kernel does not do what these layers do; the message says what.
    """

    def __init__(
        self, layers: Sequence[Layer], layouts: Sequence[BlockLayout], paged: PagedKV
    ) -> None:
        if any(layer.by_token for layer in layers):
            raise NotImplementedError("latents")
        if not HAS_TRITON or paged.device.type == "cpu":
            raise NotImplementedError("Triton does not run here")
        if paged.block_size & (paged.block_size - 1):
            raise NotImplementedError(f"blocks of {paged.block_size} tokens")
        self._paged = paged
        self._attentions = [layer.attention for layer in layers]
        self._group = max(one.num_heads // one.num_kv_heads for one in self._attentions)
        self._forwards = [
            _forward_of(layer, layout, paged) for layer, layout in zip(layers, layouts, strict=True)
        ]

    def metadata(self, slices: Sequence[Slice]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What each layer's attention is given, and the slot mapping, by layer name."""
        rows, slots = rows_of(slices, self._paged, self._group)
        names = [attention.layer_name for attention in self._attentions]
        return dict.fromkeys(names, rows), dict.fromkeys(names, slots)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside the block forwards use the kernel."""
        with ExitStack() as stack:
            for attention, forward in zip(self._attentions, self._forwards, strict=True):
                stack.enter_context(replaced(attention.impl, partial(_instead, forward)))
            yield


def _instead(forward: Forward, _: Forward) -> Forward:
    return forward


def rows_of(slices: Sequence[Slice], paged: PagedKV, group: int) -> tuple[Rows, Tensor]:
    """The rows of a forward, and where their KV stands, [tokens], int64.

    Args:
        group: the most query heads of a key head.
    """
    tiles, begin, most = [], 0, tile_rows(group)
    for request, one in enumerate(slices):
        end = begin + len(one.positions)
        tiles += [(row, min(row + most, end), request) for row in range(begin, end, most)]
        begin = end
    rows = Rows(
        torch.cat([one.positions for one in slices]),
        paged.table([one.blocks for one in slices]),
        torch.tensor(tiles, dtype=torch.int32, device=paged.device),
    )
    return rows, torch.cat([paged.slots(one.blocks, one.positions) for one in slices])


def _forward_of(layer: Layer, layout: BlockLayout, paged: PagedKV) -> Forward:
    """What is called in the place of an implementation's `forward`."""
    from semkv_rag.connector.worker.model.row_kernel import attend

    attention = layer.attention
    impl, cache = attention.impl, attention.kv_cache
    if getattr(impl, "alibi_slopes", None) is not None:
        raise NotImplementedError("alibi_slopes")
    if layout.kept.itemsize == 1:
        raise NotImplementedError("a cache of 8 bits")
    keys, values = (even_strides(places, cache, paged) for places in (layout.keys, layout.values))
    run = partial(
        attend,
        keys=keys,
        values=values,
        kv_heads=int(attention.num_kv_heads),
        value_dim=int(attention.head_size_v),
        block_size=paged.block_size,
        scale=float(impl.scale),
        softcap=float(getattr(impl, "logits_soft_cap", None) or 0.0),
        window=layer.window,
        sinks=layer.sinks,
    )

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        rows: Rows,
        output: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        heads, dim = int(attention.num_heads), int(attention.head_size_v)
        run(output.view(-1, heads, dim), query.view(len(query), heads, -1), kv_cache, rows)
        return output

    return forward


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
