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
ROWS = slice(45, 142)
SHIFT = 321
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
    matrix = rotary.matrix(SHIFT, dim).to(dtype)
    right_keys, right_values = encoded.decode(ROWS)
    right_keys, right_values = right_keys.clone(), right_values.clone()
    moved = torch.mm(right_keys.reshape(-1, dim), matrix).view_as(right_keys)

    slots = torch.randperm(BLOCKS * size)[: len(right_keys)].to(device)
    coded = encoded.coded(ROWS)
    assert coded is not None
    worst = 0.0
    for numbers, turn, right in (
        (coded[0], matrix, moved),
        (coded[0], None, right_keys),
        (coded[1], None, right_values),
    ):
        for turned in (False, True):
            # [blocks, heads, tokens, dim], or [blocks, heads, dim, tokens]
            cache = torch.full((BLOCKS, heads, size * dim), 7.0, dtype=dtype, device=device)
            block, head = cache.stride()[:2]
            where = Strides(0, block, *((1, head, size) if turned else (dim, head, 1)))
            load(
                cache,
                numbers.brought(lambda part: part.to(device)),
                slots,
                where,
                block_size=size,
                matrix=None if turn is None else turn.to(device),
            )
            worst = max(worst, wrong(cache, turned, slots, right, turn is not None))
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
