"""What the kernel for scattered rows is told of a cache; the kernel itself is in `tests/soak`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from semkv_rag.connector.worker.model.block_layout import Places
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.row_attention import RowAttention
from semkv_rag.connector.worker.model.strides import even_strides

BLOCKS, TOKENS, HEADS, DIM = 5, 16, 3, 8


def _paged() -> PagedKV:
    runner: Any = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[]),
    )
    return PagedKV(runner, TOKENS)


def _places(view: torch.Tensor) -> Places:
    """Of a view of a block's codes, [tokens, heads, dim]."""
    return Places((TOKENS, HEADS, DIM), 1, view.reshape(-1).numpy().astype(np.int64))


LAYOUTS = {
    # the cache's shape, and K in the codes of a block, [tokens, heads, dim]
    "by token": (
        (BLOCKS, 2, TOKENS, HEADS, DIM),
        lambda codes: codes.view(2, TOKENS, HEADS, DIM)[0],
    ),
    "K and V apart": (
        (2, BLOCKS, TOKENS, HEADS, DIM),
        lambda codes: codes.view(2, TOKENS, HEADS, DIM)[0],
    ),
    "by head, K beside V": (
        (BLOCKS, HEADS, TOKENS, 2 * DIM),
        lambda codes: codes.view(HEADS, TOKENS, 2 * DIM)[..., :DIM].transpose(0, 1),
    ),
    "blocks of the kernel half as long": (
        (2 * BLOCKS, TOKENS // 2, HEADS, 2 * DIM),
        lambda codes: codes.view(TOKENS, HEADS, 2 * DIM)[..., :DIM],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_say_where_each_number_stands(name: str) -> None:
    shape, keys_of = LAYOUTS[name]
    cache = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    count = 2 * TOKENS * HEADS * DIM
    places = _places(keys_of(torch.arange(count)))
    paged = _paged()
    strides = even_strides(places, cache, paged)
    blocks = torch.tensor([3, 1])
    codes = paged.codes(cache, paged.copy_blocks([cache], blocks)).view(torch.float32)
    for block, held in zip(blocks.tolist(), codes, strict=True):
        for token, head, dim in ((0, 0, 0), (1, 2, 3), (TOKENS - 1, HEADS - 1, DIM - 1)):
            at = strides.first + block * strides.block
            at += token * strides.token + head * strides.head + dim * strides.dim
            number = int(places.numbers[token, head, dim])
            assert cache.flatten()[at] == held[number]


def test_tiles_of_a_matrix_unit_are_refused() -> None:
    order = torch.arange(TOKENS * HEADS * DIM)
    order[[5, 6]] = order[[6, 5]]
    cache = torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="even distances"):
        even_strides(_places(order), cache, _paged())


def test_without_triton_the_backend_attends() -> None:
    with pytest.raises(NotImplementedError, match="Triton does not run here"):
        RowAttention([], [], _paged())
