"""vLLM's paged cache: where tokens stand in it, and whole blocks copied, lent and cleared.

vLLM puts layers into groups, each with a block table of its own: one for all layers, or with its hybrid
KV cache manager one for those with full attention and others for those with a sliding window. A request's
blocks are therefore [groups, blocks] here, of one size in all groups. Layers of different groups share
memory: no block is in two groups at a time.

Blocks are copied as the backend packs them; `block_layout` unpacks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from semkv_rag.connector.worker.model.slice import Slice
from semkv_rag.connector.worker.model.whole_windows import keeps_all

CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What a cache's numbers are taken for while they are moved, by their bytes: NumPy has no bf16."""

Counts: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NewTensor: TypeAlias = Callable[[torch.Size, Tensor], Tensor]
"""Makes a tensor of a shape, of another one's dtype and on its device."""


def _new(shape: torch.Size, like: Tensor) -> Tensor:
    return like.new_empty(shape)


class PagedKV:
    """The blocks of all layers' caches.

    Args:
        runner: vLLM's model runner, after its KV cache was made.

    Attributes:
        groups: how many groups the layers are in.
        whole: whether a request's blocks are one list, and hold all its tokens until it ends.
    """

    def __init__(self, runner: Any, block_size: int) -> None:
        self.device: torch.device = runner.device
        self.block_size = block_size
        self._blocks = int(runner.kv_cache_config.num_blocks)
        groups = runner.kv_cache_config.kv_cache_groups
        self.groups = len(groups)
        self.whole = self.groups == 1 and keeps_all(groups[0].kv_cache_spec)
        self._group = {name: at for at, group in enumerate(groups) for name in group.layer_names}

    def group_of(self, attention: Any) -> int:
        """Which group a layer is in.

        Args:
            attention: vLLM's attention module of the layer.
        """
        return self._group[attention.layer_name]

    def first_blocks(self, count: int) -> Tensor:
        """So many blocks for each group, behind vLLM's null block, [groups, count], int64."""
        blocks = torch.arange(1, 1 + self.groups * count, device=self.device)
        return blocks.view(self.groups, count)

    def slots(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Where `positions` of a request stand in the cache, [..., tokens], int64.

        Args:
            blocks: [..., blocks], int64: the request's block ids, in order.
            positions: [tokens], int64.
        """
        block = blocks[..., torch.div(positions, self.block_size, rounding_mode="floor")]
        return block * self.block_size + positions % self.block_size

    def slots_of(self, slices: Sequence[Slice]) -> Tensor:
        """Where the tokens of a forward stand, one slice behind the other, [groups, tokens], int64."""
        return torch.cat([self.slots(one.blocks, one.positions) for one in slices], dim=1)

    def table(self, requests: Sequence[Tensor]) -> Tensor:
        """Block tables, [groups, requests, blocks], int32; null blocks behind the shorter ones.

        Args:
            requests: each one's blocks, in order, [groups, blocks], int64.
        """
        width = max(blocks.shape[1] for blocks in requests)
        shape = self.groups, len(requests), width
        table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        for request, blocks in enumerate(requests):
            table[:, request, : blocks.shape[1]] = blocks
        return table

    @contextmanager
    def borrowed(
        self, caches: Sequence[Tensor], taken: Container[int], count: int
    ) -> Iterator[Tensor]:
        """Blocks to write to for a moment, [groups, count], int64; they are put back as they were.

        For tokens whose own blocks the scheduler has not given yet. The blocks may be in use: no forward
        runs on this worker meanwhile. The scheduler lets a blend in only where its whole prompt fits, so
        there are enough.

        Args:
            caches: each layer's paged cache.
            taken: the blocks that are not to be borrowed.
        """
        free = (block for block in range(1, self._blocks) if block not in taken)
        ids = [next(free) for _ in range(self.groups * count)]
        blocks = torch.tensor(ids, dtype=torch.int64)
        apart = {cache.data_ptr(): cache for cache in caches} if count else {}
        places = [(cache, *self._places(cache, blocks)) for cache in apart.values()]
        saved = [cache.index_select(axis, rows) for cache, axis, rows in places]
        try:
            yield blocks.view(self.groups, count).to(self.device)
        finally:
            for (cache, axis, rows), was in zip(places, saved, strict=True):
                cache.index_copy_(axis, rows, was)

    def clear(self, caches: Sequence[Tensor], blocks: Tensor) -> None:
        """Fill whole blocks with zeros.

        Args:
            caches: each layer's paged cache.
            blocks: [blocks], int64.
        """
        for cache in caches:
            axis, rows = self._places(cache, blocks)
            cache.view(CODES[cache.itemsize]).index_fill_(axis, rows, 0)

    def copy_blocks(
        self, caches: Sequence[Tensor], blocks: Tensor, new: NewTensor = _new
    ) -> Tensor:
        """Copies of whole blocks of layers' paged caches: [layers, ...], each in the shape of its cache.

        Args:
            caches: at least one layer's; all of one shape and dtype.
            blocks: [blocks], int64.
            new: where the memory comes from. The device copies into pinned memory of the host by itself:
                wait for it before it is read.
        """
        caches = [cache.view(CODES[cache.itemsize]) for cache in caches]
        axis, rows = self._places(caches[0], blocks)
        shape = caches[0].shape
        shape = torch.Size((len(caches), *shape[:axis], len(rows), *shape[axis + 1 :]))
        copies = new(shape, caches[0])
        for cache, copied in zip(caches, copies, strict=True):
            if copied.device == cache.device:
                torch.index_select(cache, axis, rows, out=copied)
            else:
                copied.copy_(cache.index_select(axis, rows), non_blocking=True)
        return copies

    def codes(self, cache: Tensor, copies: Tensor) -> Tensor:
        """What `copy_blocks` gave of caches like this one, where it is: [layers * blocks, codes]."""
        axis, parts = self._block_axis(cache)
        count = len(copies) * copies.shape[axis + 1] // parts
        return copies.movedim(axis + 1, 1).reshape(count, -1)

    def offsets(self, cache: Tensor, codes: Counts) -> Counts:
        """Where codes of a block stand in memory, counted from the block's first number.

        Args:
            codes: which, as `codes` gives them.
        """
        axis, parts = self._block_axis(cache)
        rest = [a for a in range(cache.ndim) if a != axis]
        places = np.unravel_index(codes, (parts, *(cache.shape[a] for a in rest)))
        strides = (cache.stride(axis), *(cache.stride(a) for a in rest))
        offsets = np.zeros_like(codes)
        for place, stride in zip(places, strides, strict=True):
            offsets += place * stride
        return offsets

    def block_stride(self, cache: Tensor) -> int:
        """How many numbers a block begins behind the one before."""
        axis, parts = self._block_axis(cache)
        return cache.stride(axis) * parts

    def _places(self, cache: Tensor, blocks: Tensor) -> tuple[int, Tensor]:
        """The axis of a layer's cache that counts blocks, and where `blocks` stand on it."""
        axis, parts = self._block_axis(cache)
        places = blocks[:, None] * parts + torch.arange(parts, device=blocks.device)
        return axis, places.flatten().to(self.device)

    def _block_axis(self, cache: Tensor) -> tuple[int, int]:
        """The axis of a layer's cache that counts blocks, and how many of its rows are one block.

        Backends lay a cache out as they like, and may split the blocks into smaller ones.
        """
        axis = next(a for a, size in enumerate(cache.shape) if size % self._blocks == 0)
        return axis, cache.shape[axis] // self._blocks
