"""How an attention backend lays out a block of the paged cache, found by writing to one.

Backends pack blocks as their kernels like them: K and V side by side or one behind the other, by token
or by head, on a CPU in the tiles of its matrix unit. None says how. But in all of them each number of a
token has a place of its own in its block. To find the places, the numbers are counted, and a block is
written once for each binary digit of the counts: ones for the numbers that have the digit, zeros for the
others. What a place held each time, read together, is the count of the number that belongs there. Ones
and zeros are told apart in quantised caches too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform

from semkv_rag.connector.worker.model.kv_tap import KVTap
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.model_view import Unservable
from semkv_rag.connector.worker.model.paged import Counts, PagedKV

PROBED_BLOCK = 1  # the first behind vLLM's null block

FP8_ERRORS = {torch.float8_e4m3fn: 0.13, torch.float8_e4m3fnuz: 0.13, torch.float8_e5m2: 0.26}
"""The largest relative error of numbers that are kept in 8 bits. On a CPU vLLM cuts bits off; elsewhere
it rounds."""

WriteBlock: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Puts K and V, [block tokens, kv_heads, head_dim], into one block and gives its codes, [codes]."""


@dataclass(frozen=True)
class Places:
    """Where the numbers of a block's K, or of its V, stand among its codes.

    Attributes:
        shape: [block tokens, kv_heads, head_dim].
        run: so many numbers in a row stand side by side, at a multiple of it.
        runs: which run of the block each of them is, in order, int64.
    """

    shape: tuple[int, int, int]
    run: int
    runs: np.ndarray[tuple[int], np.dtype[np.int64]]
    _runs_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def numbers(self) -> Counts:
        """Which of the block's codes each number is, in `shape`."""
        return (self.runs[:, None] * self.run + np.arange(self.run)).reshape(self.shape)

    def take(self, codes: Tensor) -> Tensor:
        """The codes of K or V, [tokens, kv_heads, head_dim], out of those of blocks, [blocks, codes]."""
        whole = codes.shape[1] // self.run * self.run
        blocks = codes[:, :whole].reshape(len(codes), -1, self.run)
        if codes.device.type != "cpu":
            if codes.device not in self._runs_on:
                self._runs_on[codes.device] = torch.from_numpy(self.runs).to(codes.device)
            return blocks.index_select(1, self._runs_on[codes.device]).view(-1, *self.shape[1:])
        # NumPy's take is three times as fast as torch's on numbers that stand alone.
        return torch.from_numpy(blocks.numpy().take(self.runs, axis=1)).view(-1, *self.shape[1:])


@dataclass(frozen=True)
class BlockLayout:
    """The layout of the blocks of one layer.

    Attributes:
        attention: vLLM's attention module, whose scales say what a quantised cache holds.
        kept: what the codes stand for in the cache.
        dtype: of K and V when they are written.
    """

    attention: Any
    keys: Places
    values: Places
    kept: torch.dtype
    dtype: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of a block's K and V, each [block tokens, kv_heads, head_dim]."""
        return self.keys.shape, self.values.shape

    @property
    def rounding(self) -> float:
        """The largest relative error of a number that was written and is read back."""
        return FP8_ERRORS.get(self.kept, 0.0)

    @property
    def reading(self) -> tuple[object, ...]:
        """Equal for layers whose blocks, put together, are unpacked in one go by any one of them."""
        attention = self.attention
        same = (id(self.keys), id(self.values), attention.kv_cache.shape, self.kept, self.dtype)
        if self.kept.itemsize > 1:
            return same
        return *same, attention._k_scale_float, attention._v_scale_float

    def unpack(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks, each [tokens, kv_heads, head_dim].

        Args:
            codes: as `PagedKV.codes` gives them, [blocks, codes].
        """
        return self.unpack_keys(codes), self.unpack_values(codes)

    def unpack_keys(self, codes: Tensor) -> Tensor:
        """K alone, as `unpack` gives it."""
        keys = self.keys.take(codes).view(self.kept).to(self.dtype)
        if self.kept.itemsize == 1:
            keys *= self.attention._k_scale_float
        return keys

    def unpack_values(self, codes: Tensor) -> Tensor:
        """V alone, as `unpack` gives it."""
        values = self.values.take(codes).view(self.kept).to(self.dtype)
        if self.kept.itemsize == 1:
            values *= self.attention._v_scale_float
        return values


def find_layouts(
    layers: Sequence[Layer], tap: KVTap, paged: PagedKV, dtype: torch.dtype
) -> list[BlockLayout]:
    """The layout of each layer's blocks. Writes over a block: called before any request.

    Args:
        dtype: of the model's K and V.

    Raises:
        Unservable: what is written to a layer's cache cannot be read back.
    """
    block = torch.tensor([PROBED_BLOCK], device=paged.device)
    slots = paged.slots(block, torch.arange(paged.block_size, device=paged.device))

    def writer(index: int, cache: Tensor) -> WriteBlock:
        def write(keys: Tensor, values: Tensor) -> Tensor:
            tap.write(index, keys.to(paged.device), values.to(paged.device), slots)
            return paged.codes(cache, paged.copy_blocks([cache], block))[0].cpu()

        return write

    layouts: list[BlockLayout] = []
    for index, layer in enumerate(layers):
        attention = layer.attention
        keys, values = ((paged.block_size, *shape) for shape in layer.kv_shapes)
        shapes = (keys, values)
        kept = attention.kv_cache.dtype
        if attention.kv_cache_dtype.startswith("fp8"):
            e5m2 = attention.kv_cache_dtype == "fp8_e5m2"
            kept = torch.float8_e5m2 if e5m2 else current_platform.fp8_dtype()
        write = writer(index, attention.kv_cache)
        layout = None
        if layouts and _alike(layouts[-1], attention) and layouts[-1].shapes == shapes:
            layout = replace(layouts[-1], attention=attention, kept=kept)
        if layout is None or not reads_back(layout, write):
            layout = find_layout(attention, write, shapes, kept, dtype)
        if layout is None:
            raise Unservable(
                f"the paged cache of layer {index} cannot be read back"
                f" (kv_cache_dtype {attention.kv_cache_dtype}, {layer.backend})"
            )
        layouts.append(layout)
    return layouts


def find_layout(
    attention: Any,
    write: WriteBlock,
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]],
    kept: torch.dtype,
    dtype: torch.dtype,
) -> BlockLayout | None:
    """The layout of blocks that `write` fills; None when what it writes cannot be read back.

    Args:
        shapes: of a block's K and V.
        kept, dtype: see `BlockLayout`.
    """
    key_numbers, numbers = (int(n) for n in np.cumsum([np.prod(shape) for shape in shapes]))
    counts = torch.arange(numbers)

    def written(row: Tensor) -> Tensor:
        row = row.to(dtype)
        return write(row[:key_numbers].view(shapes[0]), row[key_numbers:].view(shapes[1]))

    zeros = written(torch.zeros(numbers))
    held = torch.zeros(len(zeros), dtype=torch.int64)
    for digit in range(numbers.bit_length()):
        held |= (written(counts >> digit & 1) != zeros).long() << digit
    used = torch.nonzero(written(torch.ones(numbers)) != zeros).flatten()
    if not torch.equal(held[used].sort().values, counts):
        return None
    places = used[held[used].argsort()].numpy()
    layout = BlockLayout(
        attention,
        _places(shapes[0], places[:key_numbers]),
        _places(shapes[1], places[key_numbers:]),
        kept,
        dtype,
    )
    return layout if reads_back(layout, write) else None


def reads_back(layout: BlockLayout, write: WriteBlock) -> bool:
    """Whether random K and V that `write` puts into a block are read back as they were."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(shape, generator=generator).to(layout.dtype) for shape in layout.shapes]
    codes = write(*rows)
    return all(
        bool(((read - row).abs() / row.abs().clamp_min(0.1)).max() <= layout.rounding)
        for read, row in zip(layout.unpack(codes[None]), rows, strict=True)
    )


def _alike(layout: BlockLayout, attention: Any) -> bool:
    """Whether a layer's cache could be laid out as another's; reading it back tells if it is."""
    one, other = layout.attention.kv_cache, attention.kv_cache
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def _places(
    shape: tuple[int, int, int], places: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Places:
    run = 1
    while shape[2] % (2 * run) == 0 and _stand_side_by_side(places.reshape(-1, 2 * run)):
        run *= 2
    return Places(shape, run, places[::run] // run)


def _stand_side_by_side(runs: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> bool:
    length = runs.shape[1]
    return bool(
        (runs[:, 0] % length == 0).all() and (runs - runs[:, :1] == np.arange(length)).all()
    )
