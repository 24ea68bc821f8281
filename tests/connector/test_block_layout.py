"""Blocks of the paged cache are read back, however a backend packs them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import (
    BlockLayout,
    WriteBlock,
    find_layout,
    find_layouts,
)
from semkv_rag.connector.worker.model.model_view import Unservable
from semkv_rag.connector.worker.model.paged import CODES, PagedKV
from semkv_rag.engine import Engine
from semkv_rag.store import ChunkFile
from workbench.chunks import random_tokens, store_chunks
from workbench.inside import inside

TOKENS, HEADS, KEY_DIM, VALUE_DIM = 32, 2, 64, 32
SHAPES = ((TOKENS, HEADS, KEY_DIM), (TOKENS, HEADS, VALUE_DIM))
SCALES = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=2.0)
FP8 = torch.float8_e4m3fn


class Backend:
    """Packs a block in an order of its own, with room to spare that holds whatever it holds.

    Args:
        order: the place of each of the block's numbers, K first.
        elements: of the block.
        kept: what they are kept as.
    """

    def __init__(self, order: Tensor, elements: int, kept: torch.dtype) -> None:
        self._order, self._kept = order, kept
        self._block = torch.randn(elements).to(kept)

    def write(self, keys: Tensor, values: Tensor) -> Tensor:
        if self._kept.itemsize == 1:
            keys, values = keys / SCALES._k_scale_float, values / SCALES._v_scale_float
        numbers = torch.cat((keys.flatten(), values.flatten())).to(self._kept)
        codes = self._block.view(CODES[self._kept.itemsize])
        codes[self._order] = numbers.view(codes.dtype)
        return codes.clone()


def layout_of(write: WriteBlock, kept: torch.dtype, dtype: torch.dtype) -> BlockLayout | None:
    return find_layout(SCALES, write, SHAPES, kept, dtype)


def random_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = (torch.randn(shape).to(dtype) for shape in SHAPES)
    return keys, values


def side_by_side() -> Tensor:
    """By token and head, each head's K and V behind each other."""
    both = torch.arange(TOKENS * HEADS * (KEY_DIM + VALUE_DIM)).view(TOKENS, HEADS, -1)
    return torch.cat((both[..., :KEY_DIM].flatten(), both[..., KEY_DIM:].flatten()))


def by_head() -> Tensor:
    """All of K, then all of V, each by head, and K's numbers of a head by their place in it."""
    keys = torch.arange(TOKENS * HEADS * KEY_DIM).view(HEADS, KEY_DIM, TOKENS)
    values = keys.numel() + torch.arange(TOKENS * HEADS * VALUE_DIM).view(HEADS, TOKENS, -1)
    return torch.cat((keys.permute(2, 0, 1).flatten(), values.permute(1, 0, 2).flatten()))


def anyhow() -> Tensor:
    return torch.randperm(TOKENS * HEADS * (KEY_DIM + VALUE_DIM) + 77)[:-77]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("order", "runs"),
    [(side_by_side(), (32, 32)), (by_head(), (1, 32)), (anyhow(), (1, 1))],
    ids=["side by side", "by head", "anyhow"],
)
def test_any_order_is_found(order: Tensor, runs: tuple[int, int], dtype: torch.dtype) -> None:
    elements = len(order) + 77
    layout = layout_of(Backend(order, elements, dtype).write, dtype, dtype)
    assert layout is not None
    assert (layout.keys.run, layout.values.run) == runs
    blocks = [(random_rows(dtype), Backend(order, elements, dtype)) for _ in range(3)]
    codes = torch.stack([backend.write(*rows) for rows, backend in blocks])
    for which, read in enumerate(layout.unpack(codes)):
        assert read.shape == (3 * TOKENS, *SHAPES[which][1:])
        assert torch.equal(read, torch.cat([rows[which] for rows, _ in blocks]))


def test_numbers_of_eight_bits() -> None:
    """Read back and written again they are the same bits: an exact span stays exact."""
    backend = Backend(by_head(), 10_000, FP8)
    layout = layout_of(backend.write, FP8, torch.bfloat16)
    assert layout is not None
    codes = backend.write(*random_rows(torch.bfloat16))
    keys, values = layout.unpack(codes[None])
    assert keys.dtype == values.dtype == torch.bfloat16
    assert torch.equal(backend.write(keys, values), codes)


def test_layers_of_other_scales_are_unpacked_by_themselves() -> None:
    backend = Backend(by_head(), 10_000, FP8)
    layout = layout_of(backend.write, FP8, torch.bfloat16)
    assert layout is not None

    def scaled(k_scale: float, v_scale: float) -> BlockLayout:
        cache = torch.zeros(4, 10_000, dtype=FP8)
        attention = SimpleNamespace(kv_cache=cache, _k_scale_float=k_scale, _v_scale_float=v_scale)
        return replace(layout, attention=attention)

    assert scaled(0.5, 2.0).reading == scaled(0.5, 2.0).reading
    assert scaled(0.5, 2.0).reading != scaled(0.5, 1.0).reading
    assert scaled(0.5, 2.0).reading != scaled(1.0, 2.0).reading


def test_a_cache_that_cannot_be_read_back() -> None:
    order = by_head()
    backend = Backend(order, len(order), torch.float32)

    def forget_values(keys: Tensor, values: Tensor) -> Tensor:
        return backend.write(keys, torch.zeros_like(values))

    def round_off(keys: Tensor, values: Tensor) -> Tensor:
        return backend.write(keys.round(), values)

    twice = order.clone()
    twice[3] = twice[5]
    for write in (forget_values, round_off, Backend(twice, len(order), torch.float32).write):
        assert layout_of(write, torch.float32, torch.float32) is None


@pytest.mark.parametrize(
    ("shape", "axis", "parts"),
    [
        ((5, 2, TOKENS, HEADS, 8), 0, 1),
        ((2, 5, TOKENS, HEADS, 8), 1, 1),
        ((2, 10, TOKENS // 2, HEADS, 8), 1, 2),  # the kernel's blocks are half of vLLM's
    ],
)
def test_blocks_stand_on_any_axis(shape: tuple[int, ...], axis: int, parts: int) -> None:
    runner: Any = SimpleNamespace(
        device=torch.device("cpu"),
        attn_groups=[],
        kv_cache_config=SimpleNamespace(num_blocks=5, kv_cache_groups=[]),
    )
    paged = PagedKV(runner, TOKENS)
    cache = torch.randn(shape)
    codes = paged.codes(cache, paged.copy_blocks([cache, -cache], torch.tensor([3, 1])))
    expected = [(cache, 3), (cache, 1), (-cache, 3), (-cache, 1)]
    for (layer, block), found in zip(expected, codes, strict=True):
        own = layer.narrow(axis, block * parts, parts)
        assert torch.equal(found.view(torch.float32).sort().values, own.flatten().sort().values)


def test_a_model_with_such_a_cache_is_refused() -> None:
    """Each token of a cache of four bits would have a scale of its own."""
    attention = SimpleNamespace(
        kv_cache=torch.zeros(4, TOKENS, HEADS, KEY_DIM, dtype=torch.uint8),
        kv_cache_dtype="int4_per_token_head",
    )
    paged = SimpleNamespace(
        device=torch.device("cpu"),
        block_size=TOKENS,
        slots=lambda block, positions: block * TOKENS + positions,
        copy_blocks=lambda caches, block: torch.stack([cache[block] for cache in caches]),
        codes=lambda cache, copies: copies.flatten(0, 1).flatten(1),
    )
    tap = SimpleNamespace(write=lambda index, keys, values, slots: None)
    heads = (HEADS, KEY_DIM)
    layer: Any = SimpleNamespace(attention=attention, kv_shapes=(heads, heads), backend="SOME_ATTN")
    with pytest.raises(Unservable, match=r"layer 0 .* \(kv_cache_dtype int4_per_token_head, SOME"):
        find_layouts([layer], cast(Any, tap), cast(Any, paged), torch.bfloat16)


@pytest.mark.parametrize(
    ("isa", "dtype", "kept"),
    [
        ("vec", torch.float32, torch.float32),
        ("vec16", torch.float32, torch.float32),
        ("vec", torch.bfloat16, torch.bfloat16),
        ("amx", torch.bfloat16, torch.bfloat16),
        ("vec", torch.bfloat16, FP8),
        ("amx", torch.bfloat16, FP8),
        ("vec", torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_blocks_of_vllm_on_a_cpu(isa: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    """Not all of them run here, but all can be filled."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # those of this machine's processor

    shapes = (SHAPES[0], SHAPES[0])
    cache = torch.zeros(3, HEADS, 2 * TOKENS, KEY_DIM, dtype=dtype)
    name = "auto"
    if kept.itemsize == 1:
        cache, name = cache.to(torch.uint8), "fp8_e4m3" if kept == FP8 else "fp8_e5m2"
    scales = (SCALES._k_scale_float, SCALES._v_scale_float)

    def write(keys: Tensor, values: Tensor) -> Tensor:
        halves = cache.chunk(2, dim=2)
        slots = TOKENS + torch.arange(TOKENS)
        try:
            ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, *scales, name)
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" not in str(error):
                raise
            pytest.skip(f"vLLM's build for this processor has no {isa}")
        return cache[1].view(CODES[kept.itemsize]).flatten().clone()

    assert find_layout(SCALES, write, shapes, kept, dtype) is not None


def test_a_file_holds_what_the_model_computed(engine: Engine, namespace: str) -> None:
    """Number for number what went into the paged cache."""
    assert engine.store is not None
    context = random_tokens(7301, 45)  # the chunk does not begin with a block

    def watch(worker: object) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        tap = get_kv_transfer_group().executor._blend_pass.setting.model.tap
        tap.seen = {}

        def see(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            tap.seen.setdefault(index, []).append((keys.clone(), values.clone()))

        tap.handler = see

    def seen(worker: object) -> list[list[list[list[float]]]]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        tap = get_kv_transfer_group().executor._blend_pass.setting.model.tap
        tap.handler = None
        return [
            [torch.cat(parts).flatten(1).tolist() for parts in zip(*tap.seen[index], strict=True)]
            for index in sorted(tap.seen)
        ]

    engine.reset_prefix_cache()
    inside(engine, watch)
    (chunk,) = store_chunks(engine, [random_tokens(7300, 70)], namespace=namespace, context=context)
    computed = inside(engine, seen)
    path = engine.store.path(engine.fingerprint, namespace, chunk.id)
    with ChunkFile(path, model=engine.fingerprint) as file:
        assert file.header.layers == len(computed)
        for index, pair in enumerate(computed):
            for stored, expected in zip(file.layer(index), pair, strict=True):
                assert torch.equal(stored.flatten(1), torch.tensor(expected)[len(context) :])
