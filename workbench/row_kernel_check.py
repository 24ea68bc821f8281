"""The kernel for scattered rows against dense attention; run by `tests/soak/test_row_kernel.py`.

    TRITON_INTERPRET=1 python -m workbench.row_kernel_check \\
        float32 heads=9 kv_heads=3 dim=64 value_dim=64 block_size=16

On a GPU without the variable.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from semkv_rag.connector.worker.model.row_kernel import attend
from semkv_rag.connector.worker.model.row_tiles import Rows, tile_rows
from semkv_rag.connector.worker.model.strides import Strides

BLOCKS, OF_REQUEST = 24, 8
ASKED = (70, 33)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    softcap: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in float64, [rows, heads, value_dim].

    Args:
        keys, values: of a request's tokens in order, [tokens, kv_heads, …].
        softcap, window, sinks: as for `attend`.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1).double() for x in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", query.double(), keys) / query.shape[2] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = positions[:, None] - torch.arange(len(keys), device=query.device)
    hidden = (distance < 0) | (distance >= (len(keys) if window is None else window))
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        sunk = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sunk), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hrt,thd->rhd", weights, values)


def main() -> None:
    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
    dtype = getattr(torch, sys.argv[1])
    options = {name: int(value) for name, value in (one.split("=") for one in sys.argv[2:])}
    heads, kv_heads, dim, value_dim, size = (
        options[name] for name in ("heads", "kv_heads", "dim", "value_dim", "block_size")
    )
    turned, softcap = options.get("turned", 0), float(options.get("softcap", 0))
    window = options.get("window")
    torch.manual_seed(0)
    sinks = 2 + torch.randn(heads, device=device) if options.get("sinks") else None
    # [blocks, kv_heads, …]: K transposed and V behind it, or both side by side for each token.
    cache = torch.randn(BLOCKS, kv_heads, size * (dim + value_dim), dtype=dtype, device=device)
    block, head = cache.stride()[:2]
    width = dim + value_dim
    if turned:
        key_strides = Strides(0, block, 1, head, size)
        value_strides = Strides(dim * size, block, value_dim, head, 1)
        all_keys = cache[..., : dim * size].view(BLOCKS, kv_heads, dim, size).permute(0, 3, 1, 2)
        all_values = cache[..., dim * size :].view(BLOCKS, kv_heads, size, -1).transpose(1, 2)
    else:
        key_strides = Strides(0, block, width, head, 1)
        value_strides = Strides(dim, block, width, head, 1)
        both = cache.view(BLOCKS, kv_heads, size, width).transpose(1, 2)
        all_keys, all_values = both[..., :dim], both[..., dim:]
    tables = torch.stack([torch.randperm(BLOCKS)[:OF_REQUEST] for _ in ASKED]).to(device)
    lengths = (OF_REQUEST * size - 3, 5 * size)
    positions = [
        torch.randperm(length)[:asked].sort().values.to(device)
        for length, asked in zip(lengths, ASKED, strict=True)
    ]
    query = torch.randn(sum(map(len, positions)), heads, dim, dtype=dtype, device=device)
    out = torch.full((len(query), heads, value_dim), 7.0, dtype=dtype, device=device)
    tiles, begin, most = [], 0, tile_rows(heads // kv_heads)
    for request, of_request in enumerate(positions):
        end = begin + len(of_request)
        tiles += [(row, min(row + most, end), request) for row in range(begin, end, most)]
        begin = end
    attend(
        out,
        query,
        cache,
        Rows(
            torch.cat(positions),
            tables.int(),
            torch.tensor(tiles, dtype=torch.int32, device=device),
        ),
        keys=key_strides,
        values=value_strides,
        kv_heads=kv_heads,
        value_dim=value_dim,
        block_size=size,
        scale=dim**-0.5,
        softcap=softcap,
        window=window,
        sinks=sinks,
    )
    begin, worst = 0, 0.0
    for table, of_request, length in zip(tables, positions, lengths, strict=True):
        keys = all_keys[table].reshape(-1, kv_heads, dim)[:length]
        values = all_values[table].reshape(-1, kv_heads, value_dim)[:length]
        rows = slice(begin, begin + len(of_request))
        expected = dense(
            query[rows], keys, values, of_request, softcap=softcap, window=window, sinks=sinks
        )
        worst = max(worst, float((out[rows].double() - expected).abs().max()))
        begin = rows.stop
    print(f"largest error {worst:.2g}")
    sys.exit(not worst <= TOLERANCES[dtype])


if __name__ == "__main__":
    main()
