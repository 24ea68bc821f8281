"""Scattered tokens in vLLM's paged attention, with the exact causal mask.

The tokens a blend computes stand at scattered positions of one request. Each run of neighbouring
positions becomes a pseudo-sequence that shares the request's block table, with `query_len` the run's
length and `seq_len` its last position + 1: to vLLM's own kernels this is a batch of chunked prefills,
and each token attends to everything before it. All features of the backend stay in force. Runs of
several requests may stand in one batch, each with its request's block table.

The metadata comes from builders of our own. vLLM's write into buffers that its own forwards read, and
that have room for `max_num_seqs` sequences; ours have room for `MOST_RUNS` runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.runs import Runs
from semkv_rag.connector.worker.model.slice import Slice

MOST_RUNS = 1024
"""The most runs of a forward. Backends keep a block table for each: 32 MB at 128k tokens of context."""


class ScatteredAttention:
    """Makes the attention metadata of the blends' forwards.

    Args:
        runner: vLLM's model runner, after its KV cache was made.
        config: vLLM's.
        by_token: whether each token is a pseudo-sequence of its own, and not each run.
    """

    def __init__(
        self, runner: Any, config: VllmConfig, paged: PagedKV, *, by_token: bool = False
    ) -> None:
        self._paged, self._by_token = paged, by_token
        most = MOST_RUNS
        if by_token:  # no launch has more tokens but a question, which is as long as it is
            most = max(most, config.scheduler_config.max_num_batched_tokens)
        config = _config_of_runs(config, most)
        with set_current_vllm_config(config):
            self._groups = [
                [_with_own_builder(one, config, paged.device) for one in alike]
                for alike in runner.attn_groups
            ]

    def metadata(self, slices: Sequence[Slice]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and slot mapping by layer name, for one forward.

        Args:
            slices: each of at least one token, of at most `MOST_RUNS` runs in all.
        """
        runs = Runs.of([one.positions.cpu() for one in slices], by_token=self._by_token)
        slots = self._paged.slots_of(slices)
        tables = self._paged.table([one.blocks for one in slices])
        tables = tables[:, runs.owners.to(self._paged.device)]
        common = CommonAttentionMetadata(
            query_start_loc=runs.query_start.to(self._paged.device),
            query_start_loc_cpu=runs.query_start,
            seq_lens=runs.seq_lens.to(self._paged.device),
            seq_lens_cpu_upper_bound=runs.seq_lens,
            num_reqs=len(runs),
            num_actual_tokens=slots.shape[1],
            max_query_len=runs.longest,
            max_seq_len=int(runs.seq_lens.max()),
            block_table_tensor=tables[0],
            slot_mapping=slots[0],
            positions=torch.cat([one.positions for one in slices]),
        )
        by_layer: dict[str, Any] = {}
        slots_by_layer: dict[str, Tensor] = {}
        for alike, table, places in zip(self._groups, tables, slots, strict=True):
            common = dataclasses.replace(common, block_table_tensor=table, slot_mapping=places)
            for group in alike:
                # fast_build: FlashAttention 3 plans no schedule, which one forward would not pay back.
                built = group.build_metadata(common, fast_build=True)
                by_layer.update(dict.fromkeys(group.layer_names, built))
                slots_by_layer.update(dict.fromkeys(group.layer_names, places))
        return by_layer, slots_by_layer

    def computing(self) -> AbstractContextManager[None]:
        """Inside the block forwards use the backend's own attention."""
        return nullcontext()


def _config_of_runs(config: VllmConfig, most_runs: int) -> VllmConfig:
    """vLLM's configuration for builders that are given so many runs at most, and no CUDA graph."""
    config = copy(config)
    config.scheduler_config = copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = most_runs
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


def _with_own_builder(group: Any, config: VllmConfig, device: torch.device) -> Any:
    """An attention group of vLLM's with a metadata builder that nobody else uses."""
    kernel_block_size = group.get_metadata_builder().kv_cache_spec.block_size
    own = dataclasses.replace(group, metadata_builders=[], kernel_block_table=None)
    own.create_metadata_builders(config, device, kernel_block_size)
    return own
