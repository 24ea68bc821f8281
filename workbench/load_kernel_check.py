"""The kernel that loads stored KV against torch; run by `tests/soak/test_load_kernel.py`.

    TRITON_INTERPRET=1 python -m workbench.load_kernel_check \\
        float32 codec=int8 heads=3 dim=64 block_size=16

On a GPU without the variable.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from semkv_rag.blend import Rotary
from semkv_rag.connector.worker.model.load_kernel import load
from semkv_rag.connector.worker.model.strides import Strides
from semkv_rag.store.codecs import EncodedLayer, codec_named

BLOCKS = 60
STORED = 150
ROWS = slice(45, 142), slice(3, 30), slice(70, 71)
SHIFTS = 321, -17, 0
"""Of the spans of a chunk."""
STEP = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Of what is added up, the largest error: torch and Triton round on different ways."""


def main() -> None:
    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
    dtype = getattr(torch, sys.argv[1])
    options = dict(one.split("=") for one in sys.argv[2:])
    heads, dim, size = (int(options[name]) for name in ("heads", "dim", "block_size"))
    moves = int(options.get("rotary", dim))
    torch.manual_seed(0)
    keys, values = (torch.randn(STORED, heads, dim) for _ in range(2))
    keys[:, :, 0] += 9
    codec = codec_named(options["codec"])
    encoded = EncodedLayer(codec, codec.encode(keys.to(dtype), values.to(dtype)), dtype)

    angles = torch.arange(1000)[:, None] / 1e4 ** (torch.arange(0, moves, 2) / moves)
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), 1), bool(options.get("interleaved")))
    matrices = torch.stack([rotary.matrix(shift, dim) for shift in SHIFTS]).to(dtype)
    parts = [tuple(part.clone() for part in encoded.decode(rows)) for rows in ROWS]
    right_keys, right_values = (torch.cat(both) for both in zip(*parts, strict=True))
    each = [
        torch.mm(keys.reshape(-1, dim), one) for (keys, _), one in zip(parts, matrices, strict=True)
    ]
    moved = torch.cat(each).view_as(right_keys)

    slots = torch.randperm(BLOCKS * size)[: len(right_keys)].to(device)
    coded = [encoded.coded(rows) for rows in ROWS]
    coded_keys, coded_values = zip(*filter(None, coded), strict=True)
    worst = 0.0
    for numbers, turns, right in (
        (coded_keys, matrices, moved),
        (coded_keys, None, right_keys),
        (coded_values, None, right_values),
    ):
        for turned in (False, True):
            # [blocks, heads, tokens, dim], or [blocks, heads, dim, tokens]
            cache = torch.full((BLOCKS, heads, size * dim), 7.0, dtype=dtype, device=device)
            block, head = cache.stride()[:2]
            where = Strides(0, block, *((1, head, size) if turned else (dim, head, 1)))
            load(
                cache,
                numbers,
                slots,
                where,
                block_size=size,
                join=lambda parts: torch.cat([*parts]).to(device),
                matrices=None if turns is None else turns.to(device),
            )
            worst = max(worst, wrong(cache, turned, slots, right, turns is not None))
    print(f"largest error {worst:.2g}")
    sys.exit(not worst <= STEP[dtype])


def wrong(cache: Tensor, turned: bool, slots: Tensor, right: Tensor, moved: bool) -> float:
    """The largest error of a number, by the size of those that it is made of; infinite where a number
    was written that is nobody's."""
    _, heads, dim = right.shape
    held = cache.view(BLOCKS, heads, dim, -1).transpose(2, 3) if turned else cache
    held = held.reshape(BLOCKS, heads, -1, dim).transpose(1, 2).reshape(-1, heads, dim).cpu()
    others = torch.ones(len(held), dtype=torch.bool)
    others[slots.cpu()] = False
    if not bool((held[others] == 7).all()):
        return float("inf")
    right = right.double()
    made_of = right.norm(dim=-1, keepdim=True) if moved else right.abs()
    return float(((held[slots.cpu()] - right).abs() / made_of.clamp_min(1e-3)).max())


if __name__ == "__main__":
    main()
