"""Stored KV into a paged cache, in Triton: decoded, moved and written in one go.

This kernel reads each number once, as it is stored, and writes it once. Without it, decoding, the product
with the rotation and vLLM's write are three kernels, and each reads what the one before it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv_rag.connector.worker.model.strides import Strides
from semkv_rag.store.codecs.coded import Coded, Join

TOKENS = 32
"""Tokens of a tile."""

DIMS = 64
"""The most numbers of each token in a tile."""


def load(
    cache: Tensor,
    numbers: Sequence[Coded],
    slots: Tensor,
    where: Strides,
    *,
    block_size: int,
    join: Join,
    matrices: Tensor | None = None,
) -> None:
    """Write K or V of some spans to `cache` at `slots`, in one go.

    Args:
        cache: one layer's, of any shape, in the dtype of K and V; `where` says what stands where.
        numbers: each span's, on the host, all alike but for their length and beginning.
        slots: of the first span's tokens, then the next one's, [tokens], int64.
        block_size: tokens of a block.
        join: puts tensors of the host one behind the other, on the cache's device.
        matrices: what each span's K are multiplied by from the right, [spans, head_dim, head_dim], in the
            cache's dtype: the rotations that move them. None leaves the numbers as they are.
    """
    one = numbers[0]
    heads, dim = one.shape
    fp8 = one.codes.dtype == torch.float8_e4m3fn
    # As bytes: not every device that Triton runs on has such numbers.
    codes = join([each.codes.view(torch.int8) if fp8 else each.codes for each in numbers])
    scales = [each.scale for each in numbers if each.scale is not None]
    middles = [each.middle for each in numbers if each.middle is not None]
    scale, middle = (join(parts) if parts else None for parts in (scales, middles))
    spans = tuple(
        (len(each.codes), each.begin, 0 if each.scale is None else len(each.scale))
        for each in numbers
    )
    tiles = _tiles(spans, cache.device)
    groups = 1 if scale is None else scale.shape[2]
    unread = codes  # some memory
    tile = min(DIMS, triton.next_power_of_2(max(dim, 16)))
    _kernel[len(tiles), heads, triton.cdiv(dim, tile)](
        cache,
        slots,
        tiles,
        codes,
        unread if scale is None else scale,
        unread if middle is None else middle,
        unread if matrices is None else matrices,
        codes[0].numel(),
        heads * groups,
        groups,
        one.group_tokens,
        *(where.first, where.block, where.token, where.head, where.dim),
        block_size,
        heads * dim // 2,
        dim=dim,
        group_dims=dim // groups,
        tokens=TOKENS,
        tile=tile,
        all_dims=triton.next_power_of_2(max(dim, 16)),
        coded=scale is not None,
        packed=codes.dtype == torch.uint8,
        fp8=fp8,
        centred=middle is not None,
        moved=matrices is not None,
        exact=cache.dtype == torch.float32,
        most=torch.finfo(cache.dtype).max,
    )


@lru_cache(maxsize=64)  # the same for each layer, and for K and V
def _tiles(spans: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """What each tile is of, [tiles, 5], int32.

    Its first token among all spans' tokens, and how many it has; the place of the first one in its span's
    groups, the span's first group, and which span it is.

    Args:
        spans: each one's tokens, the place of the first one in its group, and its groups.
    """
    tiles, token, group = [], 0, 0
    for number, (count, begin, groups) in enumerate(spans):
        tiles += [
            (token + at, min(TOKENS, count - at), begin + at, group, number)
            for at in range(0, count, TOKENS)
        ]
        token, group = token + count, group + groups
    return torch.tensor(tiles, dtype=torch.int32).to(device)


# No span is compiled for while a request waits.
@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize_on_alignment=["slots"]
)
def _kernel(  # type: ignore[no-untyped-def]
    cache,
    slots,
    tiles,
    codes,
    scale,
    middle,
    matrices,
    codes_token,
    scale_group,
    scale_head,
    group_tokens,
    first,
    block_stride,
    token_stride,
    head_stride,
    dim_stride,
    block_size,
    half,
    dim: tl.constexpr,
    group_dims: tl.constexpr,
    tokens: tl.constexpr,
    tile: tl.constexpr,
    all_dims: tl.constexpr,
    coded: tl.constexpr,
    packed: tl.constexpr,
    fp8: tl.constexpr,
    centred: tl.constexpr,
    moved: tl.constexpr,
    exact: tl.constexpr,
    most: tl.constexpr,
):
    about = tiles + tl.program_id(0) * 5
    within = tl.arange(0, tokens)
    rows = tl.load(about).to(tl.int64) + within
    here = within < tl.load(about + 1)
    head = tl.program_id(1).to(tl.int64)
    written = tl.program_id(2) * tile + tl.arange(0, tile)
    # A moved number depends on all of its head's.
    dims = tl.arange(0, all_dims) if moved else written
    mask = here[:, None] & (dims < dim)[None, :]

    number = head * dim + dims
    if packed:
        place = tl.where(number < half, number, number - half)
        both = tl.load(codes + rows[:, None] * codes_token + place[None, :], mask=mask, other=0)
        both = both.to(tl.int32)
        numbers = tl.where((number < half)[None, :], both & 15, both >> 4).to(tl.float32)
    else:
        numbers = tl.load(codes + rows[:, None] * codes_token + number[None, :], mask=mask, other=0)
        if fp8:
            # Moved by 7 bits an e4m3 number is a float16, 2 ** 8 times as small. -0x4080: the sign, and
            # the bits that it then has.
            bits = (numbers.to(tl.int16) << 7) & -0x4080
            numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if coded:
        group = tl.load(about + 3) + (tl.load(about + 2) + within) // group_tokens
        group = group.to(tl.int64)
        place = group[:, None] * scale_group + head * scale_head + (dims // group_dims)[None, :]
        scales = tl.load(scale + place, mask=mask, other=0.0).to(tl.float32)
        numbers = numbers.to(tl.float32) * scales
        if centred:
            middles = tl.load(middle + place, mask=mask, other=0.0).to(tl.float32)
            if packed:
                middles = middles - 7.5 * scales
            numbers = numbers + middles
        numbers = numbers.to(cache.dtype.element_ty)

    if moved:
        matrix = matrices + tl.load(about + 4).to(tl.int64) * dim * dim
        turn = tl.load(
            matrix + dims[:, None] * dim + written[None, :],
            mask=(dims < dim)[:, None] & (written < dim)[None, :],
            other=0.0,
        )
        numbers = tl.dot(numbers, turn, input_precision="ieee") if exact else tl.dot(numbers, turn)
        # As in `stored_kv`: outside of a window an overflow would go unseen, and stay in the block.
        numbers = tl.minimum(tl.maximum(numbers, -most), most)

    slot = tl.load(slots + rows, mask=here, other=0)
    place = first + slot // block_size * block_stride + slot % block_size * token_stride
    tl.store(
        cache + place[:, None] + head * head_stride + written[None, :] * dim_stride,
        numbers.to(cache.dtype.element_ty),
        mask=here[:, None] & (written < dim)[None, :],
    )
