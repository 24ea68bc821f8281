"""Scattered tokens in vLLM's paged attention, with the exact causal mask.

The tokens a blend computes stand at scattered positions of one request. Each run of neighbouring
positions becomes a pseudo-sequence that shares the request's block table, with `query_len` the run's
length and `seq_len` its last position + 1: to vLLM's own kernels this is a batch of chunked prefills,
and each token attends to everything before it. All features of the backend stay in force. Runs of
several requests may stand in one batch, each with its request's block table.

The metadata comes from builders of our own. vLLM's write into buffers that its own forwards read, and
that have room for `max_num_seqs` sequences; ours have room for `MOST_RUNS` runs.

Whole blocks can be copied out of the cache, packed as the backend packs them; `block_layout` unpacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from semkv_rag.connector.worker.model.runs import Runs
from semkv_rag.connector.worker.model.slice import Slice

MOST_RUNS = 1024
"""Of one forward. Backends keep a block table for each, 32 MB at 128k tokens of context."""

CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What a cache's numbers are taken for while they are moved, by their bytes: NumPy has no bf16."""

NewTensor: TypeAlias = Callable[[torch.Size, Tensor], Tensor]
"""Makes a tensor of a shape, of another one's dtype and on its device."""


def _new(shape: torch.Size, like: Tensor) -> Tensor:
    return like.new_empty(shape)


class PagedKV:
    """Slots and attention metadata for tokens of requests.

    Args:
        runner: vLLM's model runner, after its KV cache was made.
        config: vLLM's.
    """

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        self.device: torch.device = runner.device
        self.block_size = int(config.cache_config.block_size)
        self._blocks = int(runner.kv_cache_config.num_blocks)
        groups = [group for groups in runner.attn_groups for group in groups]
        config = _config_of_runs(config)
        with set_current_vllm_config(config):
            self._groups = [_with_own_builder(group, config, self.device) for group in groups]

    def slots(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Where `positions` of a request stand in the cache, [tokens], int64.

        Args:
            blocks: [blocks], int64: the request's block ids, in order.
            positions: [tokens], int64.
        """
        block = blocks[torch.div(positions, self.block_size, rounding_mode="floor")]
        return block * self.block_size + positions % self.block_size

    def metadata(self, slices: Sequence[Slice]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and slot mapping by layer name, for one forward.

        Args:
            slices: each of at least one token, of at most `MOST_RUNS` runs in all.
        """
        runs = Runs.of([one.positions.cpu() for one in slices])
        slots = torch.cat([self.slots(one.blocks, one.positions) for one in slices])
        common = CommonAttentionMetadata(
            query_start_loc=runs.query_start.to(self.device),
            query_start_loc_cpu=runs.query_start,
            seq_lens=runs.seq_lens.to(self.device),
            seq_lens_cpu_upper_bound=runs.seq_lens,
            num_reqs=len(runs),
            num_actual_tokens=len(slots),
            max_query_len=runs.longest,
            max_seq_len=int(runs.seq_lens.max()),
            block_table_tensor=self._block_table(slices)[runs.owners.to(self.device)],
            slot_mapping=slots,
            positions=torch.cat([one.positions for one in slices]),
        )
        by_layer: dict[str, Any] = {}
        for group in self._groups:
            # Nothing is read again: a schedule would not pay for its making.
            built = group.build_metadata(common, fast_build=True)
            by_layer.update(dict.fromkeys(group.layer_names, built))
        return by_layer, dict.fromkeys(by_layer, slots)

    def _block_table(self, slices: Sequence[Slice]) -> Tensor:
        """Of each slice's request, [slices, blocks], int32; null blocks behind the shorter ones."""
        width = max(len(one.blocks) for one in slices)
        table = torch.zeros(len(slices), width, dtype=torch.int32, device=self.device)
        for row, one in zip(table, slices, strict=True):
            row[: len(one.blocks)] = one.blocks
        return table

    @contextmanager
    def borrowed(
        self, caches: Sequence[Tensor], taken: Container[int], count: int
    ) -> Iterator[Tensor]:
        """Blocks to write to for a moment, [count], int64; they are put back as they were.

        For tokens whose own blocks the scheduler has not given yet. The blocks may be in use: no forward
        runs on this worker meanwhile. The scheduler lets a blend in only where its whole prompt fits, so
        there are enough.

        Args:
            caches: each layer's paged cache.
            taken: the blocks that are not to be borrowed.
        """
        free = (block for block in range(1, self._blocks) if block not in taken)
        blocks = torch.tensor([next(free) for _ in range(count)], dtype=torch.int64)
        places = [(cache, *self._places(cache, blocks)) for cache in (caches if count else ())]
        saved = [cache.index_select(axis, rows) for cache, axis, rows in places]
        try:
            yield blocks.to(self.device)
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
            new: where the memory comes from.
        """
        caches = [cache.view(CODES[cache.itemsize]) for cache in caches]
        axis, rows = self._places(caches[0], blocks)
        shape = caches[0].shape
        shape = torch.Size((len(caches), *shape[:axis], len(rows), *shape[axis + 1 :]))
        copies = new(shape, caches[0])
        for cache, copied in zip(caches, copies, strict=True):
            torch.index_select(cache, axis, rows, out=copied)
        return copies

    def codes(self, cache: Tensor, copies: Tensor) -> Tensor:
        """What `copy_blocks` gave of caches like this one: [layers * blocks, codes], on the CPU."""
        axis, parts = self._block_axis(cache)
        count = len(copies) * copies.shape[axis + 1] // parts
        return copies.cpu().movedim(axis + 1, 1).reshape(count, -1)

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


def _config_of_runs(config: VllmConfig) -> VllmConfig:
    """vLLM's configuration for builders that are given runs, and no CUDA graph."""
    config = copy(config)
    config.scheduler_config = copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = MOST_RUNS
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


def _with_own_builder(group: Any, config: VllmConfig, device: torch.device) -> Any:
    """An attention group of vLLM's with a metadata builder that nobody else uses."""
    kernel_block_size = group.get_metadata_builder().kv_cache_spec.block_size
    own = dataclasses.replace(group, metadata_builders=[], kernel_block_table=None)
    own.create_metadata_builders(config, device, kernel_block_size)
    return own
