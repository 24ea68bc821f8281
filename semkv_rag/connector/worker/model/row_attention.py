"""Attention of scattered tokens by a kernel of our own, where Triton runs; see `row_kernel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.replaced import Forward, replaced
from semkv_rag.connector.worker.model.row_tiles import Rows, tile_rows
from semkv_rag.connector.worker.model.slice import Slice
from semkv_rag.connector.worker.model.strides import require_triton, strides_of


class RowAttention:
    """Takes the place of the backend's attention in the blends' forwards.

    Raises:
        NotImplementedError: the kernel does not do what these layers do; the message says what.
    """

    def __init__(
        self, layers: Sequence[Layer], layouts: Sequence[BlockLayout], paged: PagedKV
    ) -> None:
        require_triton(layers, paged)
        if paged.block_size & (paged.block_size - 1):
            raise NotImplementedError(f"blocks of {paged.block_size} tokens")
        self._paged = paged
        self._attentions = [layer.attention for layer in layers]
        self._queries_per_key = max(one.num_heads // one.num_kv_heads for one in self._attentions)
        self._forwards = [
            _forward_of(layer, layout, paged) for layer, layout in zip(layers, layouts, strict=True)
        ]

    def metadata(self, slices: Sequence[Slice]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What each layer's attention is given, and the slot mapping, by layer name."""
        rows = rows_of(slices, self._paged, self._queries_per_key)
        slots = self._paged.slots_of(slices)
        groups = {one.layer_name: self._paged.group_of(one) for one in self._attentions}
        return (
            {name: rows[group] for name, group in groups.items()},
            {name: slots[group] for name, group in groups.items()},
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside the block forwards use the kernel."""
        with ExitStack() as stack:
            for attention, forward in zip(self._attentions, self._forwards, strict=True):
                stack.enter_context(replaced(attention.impl, partial(_instead, forward)))
            yield


def _instead(forward: Forward, _: Forward) -> Forward:
    return forward


def rows_of(slices: Sequence[Slice], paged: PagedKV, queries_per_key: int) -> list[Rows]:
    """The rows of a forward, as the layers of each group are given them.

    Args:
        queries_per_key: the most query heads of a key head.
    """
    tiles, begin, most = [], 0, tile_rows(queries_per_key)
    for request, one in enumerate(slices):
        end = begin + len(one.positions)
        tiles += [(row, min(row + most, end), request) for row in range(begin, end, most)]
        begin = end
    positions = torch.cat([one.positions for one in slices])
    tables = paged.table([one.blocks for one in slices])
    rows = torch.tensor(tiles, dtype=torch.int32, device=paged.device)
    return [Rows(positions, table, rows) for table in tables]


def _forward_of(layer: Layer, layout: BlockLayout, paged: PagedKV) -> Forward:
    """What is called in the place of an implementation's `forward`."""
    from semkv_rag.connector.worker.model.row_kernel import attend

    attention = layer.attention
    impl = attention.impl
    if getattr(impl, "alibi_slopes", None) is not None:
        raise NotImplementedError("alibi_slopes")
    keys, values = strides_of(layout, paged)
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
