"""Attention of scattered tokens over a paged cache, in Triton: each row has a position of its own.

A run of neighbouring tokens, taken for a sequence, reads all keys before it by itself. Here a tile of
rows of one request, with all query heads that share a key head, reads each key once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_rag.connector.worker.model.row_tiles import Rows, tile_rows
from semkv_rag.connector.worker.model.strides import Strides

KEYS = 64
"""Keys that a tile looks at in one go, at most."""


def attend(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    rows: Rows,
    *,
    keys: Strides,
    values: Strides,
    kv_heads: int,
    value_dim: int,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write to `out` the attention of each row to the tokens of its request up to its own position.

    Args:
        out: [rows, heads, value_dim].
        query: [rows, heads, head_dim].
        cache: one layer's, of any shape; `keys` and `values` say what stands where.
        block_size: tokens of a block, a power of two.
        softcap: as in Gemma 2, arXiv 2408.00118, section 2; 0 for none.
        window: how many tokens a row attends to, itself and those right before it; None for all.
        sinks: logits that take their part of the softmax and have no value, [heads].
    """
    heads, dim = query.shape[1:]
    group = heads // kv_heads
    _kernel[len(rows.tiles), kv_heads](
        out,
        query,
        cache,
        rows.positions,
        rows.tables,
        rows.tiles,
        rows.tables.stride(0),
        *query.stride()[:2],
        *out.stride()[:2],
        *(keys.first, keys.block, keys.token, keys.head, keys.dim),
        *(values.first, values.block, values.token, values.head, values.dim),
        scale,
        softcap,
        query if sinks is None else sinks,  # some memory, which is not read
        window or 0,
        group=group,
        dim=dim,
        value_dim=value_dim,
        block_size=block_size,
        tile=triton.next_power_of_2(tile_rows(group) * group),
        padded_dim=triton.next_power_of_2(max(dim, 16)),
        padded_value_dim=triton.next_power_of_2(max(value_dim, 16)),
        step=min(block_size, KEYS),
        capped=softcap > 0,
        sunk=sinks is not None,
        windowed=window is not None,
        exact=query.dtype == torch.float32,
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    cache,
    positions,
    tables,
    tiles,
    table_stride,
    query_row,
    query_head,
    out_row,
    out_head,
    key_first,
    key_block,
    key_token,
    key_head,
    key_dim,
    value_first,
    value_block,
    value_token,
    value_head,
    value_dim_stride,
    scale,
    softcap,
    sinks,
    window,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
    step: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    windowed: tl.constexpr,
    exact: tl.constexpr,
):
    begin = tl.load(tiles + tl.program_id(0) * 3)
    end = tl.load(tiles + tl.program_id(0) * 3 + 1)
    table = tables + tl.load(tiles + tl.program_id(0) * 3 + 2) * table_stride
    kv_head = tl.program_id(1)

    places = tl.arange(0, tile)
    row = (begin + places // group).to(tl.int64)
    head = kv_head * group + places % group
    here = row < end
    position = tl.load(positions + row, mask=here, other=-1)
    dims = tl.arange(0, padded_dim)
    value_dims = tl.arange(0, padded_value_dim)
    asked = tl.load(
        query + row[:, None] * query_row + head[:, None] * query_head + dims[None, :],
        mask=here[:, None] & (dims < dim)[None, :],
        other=0.0,
    )

    if sunk:
        # As a key that every row has seen, and whose value is 0.
        highest = tl.load(sinks + head).to(tl.float32)
        total = tl.full([tile], 1.0, tl.float32)
    else:
        highest = tl.full([tile], -float("inf"), tl.float32)
        total = tl.zeros([tile], tl.float32)
    mixed = tl.zeros([tile, padded_value_dim], tl.float32)
    last = tl.load(positions + end - 1)
    seen_from = tl.zeros([], tl.int64)
    if windowed:
        # Nothing before it is seen by the tile's first row, nor by those behind.
        seen_from = tl.maximum(tl.load(positions + begin) - window + 1, 0) // step * step
    for first in range(seen_from, last + 1, step):
        block = tl.load(table + first // block_size).to(tl.int64)
        tokens = first % block_size + tl.arange(0, step)
        columns = first + tl.arange(0, step)
        known = columns <= last
        key = tl.load(
            cache
            + (key_first + block * key_block + kv_head * key_head)
            + tokens[None, :] * key_token
            + dims[:, None] * key_dim,
            mask=known[None, :] & (dims < dim)[:, None],
            other=0.0,
        )
        if exact:
            scores = tl.dot(asked, key, input_precision="ieee") * scale
        else:
            scores = tl.dot(asked, key) * scale
        if capped:
            # tanh by way of exp, which every backend has.
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        seen = columns[None, :] <= position[:, None]
        if windowed:
            seen = seen & (columns[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        highest_now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet, or is nobody's, keeps zeros.
        pivot = tl.where(highest_now == -float("inf"), 0.0, highest_now)
        weights = tl.exp(scores - pivot[:, None])
        faded = tl.exp(highest - pivot)
        total = total * faded + tl.sum(weights, 1)
        value = tl.load(
            cache
            + (value_first + block * value_block + kv_head * value_head)
            + tokens[:, None] * value_token
            + value_dims[None, :] * value_dim_stride,
            mask=known[:, None] & (value_dims < value_dim)[None, :],
            other=0.0,
        )
        if exact:
            mixed = mixed * faded[:, None] + tl.dot(weights, value, input_precision="ieee")
        else:
            mixed = mixed * faded[:, None] + tl.dot(weights.to(value.dtype), value)
        highest = highest_now

    tl.store(
        out + row[:, None] * out_row + head[:, None] * out_head + value_dims[None, :],
        (mixed / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty),
        mask=here[:, None] & (value_dims < value_dim)[None, :],
    )
