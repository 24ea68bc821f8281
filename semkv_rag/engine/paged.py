"""Scattered tokens in vLLM's paged attention, with the exact causal mask.

The tokens a blend computes stand at scattered positions of one request. Each run of neighbouring
positions becomes a pseudo-sequence that shares the request's block table, with `query_len` the run's
length and `seq_len` its last position + 1: to vLLM's own kernels this is a batch of chunked prefills,
and each token attends to everything before it. All features of the backend stay in force.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata


class PagedKV:
    """Slots and attention metadata for the tokens of one request at a time.

    Args:
        runner: vLLM's model runner, after its KV cache was made.
    """

    def __init__(self, runner: Any, block_size: int) -> None:
        self.device: torch.device = runner.device
        self._groups = [group for groups in runner.attn_groups for group in groups]
        self._block_size = block_size

    def slots(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Where `positions` of a request stand in the cache, [tokens], int64.

        Args:
            blocks: [blocks], int64: the request's block ids, in order.
            positions: [tokens], int64.
        """
        block = blocks[torch.div(positions, self._block_size, rounding_mode="floor")]
        return block * self._block_size + positions % self._block_size

    def metadata(
        self, blocks: Tensor, positions: Tensor
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and slot mapping by layer name, for tokens at `positions`.

        Args:
            blocks: [blocks], int64: the request's block ids, in order.
            positions: [tokens], int64, ascending, at least one.
        """
        cpu = positions.cpu()
        breaks = torch.nonzero(cpu[1:] != cpu[:-1] + 1).flatten() + 1
        starts = torch.cat((torch.zeros(1, dtype=torch.long), breaks, torch.tensor([len(cpu)])))
        seq_lens = (cpu[starts[1:] - 1] + 1).to(torch.int32)
        query_start = starts.to(torch.int32)
        runs = len(seq_lens)
        slots = self.slots(blocks, positions)
        common = CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device),
            query_start_loc_cpu=query_start,
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=runs,
            num_actual_tokens=len(cpu),
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=blocks.to(torch.int32).expand(runs, -1).contiguous(),
            slot_mapping=slots,
            positions=positions,
        )
        by_layer: dict[str, Any] = {}
        for group in self._groups:
            built = group.get_metadata_builder().build(0, common)
            by_layer.update(dict.fromkeys(group.layer_names, built))
        return by_layer, dict.fromkeys(by_layer, slots)
