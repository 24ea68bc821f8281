"""Builders of attention metadata keep buffers on a GPU: a blend has builders of its own.

FlashAttention 3's schedule and FlashInfer's wrappers are such buffers; vLLM gives them room for
`max_num_seqs` sequences, and the step's forward reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.engine import Engine
from workbench.engines import Engines
from workbench.inside import inside


@pytest.fixture(scope="module")
def engine(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with engines.own(tiny_model("qwen3"), num_gpu_blocks_override=40, max_num_seqs=4) as engine:
        yield engine


def test_a_blend_leaves_the_buffers_of_a_step_alone(engine: Engine) -> None:
    """With a builder that has such a buffer, more runs than `max_num_seqs`, and a step under way."""

    def lengths(worker: Any) -> tuple[list[int], list[int], list[int]]:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.cpu_attn import (
            CPUAttentionBackend,
            CPUAttentionMetadataBuilder,
        )

        from semkv_rag.connector.worker.model.paged import PagedKV
        from semkv_rag.connector.worker.model.scattered import ScatteredAttention
        from semkv_rag.connector.worker.model.slice import Slice

        class Buffered(CPUAttentionMetadataBuilder):
            def __init__(self, spec: Any, names: Any, config: Any, device: Any) -> None:
                super().__init__(spec, names, config, device)
                room = config.scheduler_config.max_num_seqs
                self.buffer = torch.zeros(room, dtype=torch.int32)

            def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
                built = super().build(prefix, common, fast_build)
                assert common.num_reqs <= len(self.buffer), "no room"
                self.buffer.zero_()
                self.buffer[: common.num_reqs] = common.seq_lens
                built.seq_lens = self.buffer[: common.num_reqs]
                return built

        class Backend(CPUAttentionBackend):
            @staticmethod
            def get_builder_cls() -> Any:
                return Buffered

        runner = worker.model_runner
        group = runner.attn_groups[0][0]
        backend, builders = group.backend, group.metadata_builders
        try:
            group.backend = Backend
            with set_current_vllm_config(worker.vllm_config):
                group.create_metadata_builders(
                    worker.vllm_config, runner.device, builders[0].kv_cache_spec.block_size
                )
            blocks = torch.arange(1, 9)[None]
            step = Slice([1] * 3, blocks, torch.arange(5, 8))
            runs = Slice([1] * 100, blocks, torch.arange(0, 200, 2))
            paged = PagedKV(runner, 32)
            attention = ScatteredAttention(runner, worker.vllm_config, paged)
            own, attention._groups = attention._groups, runner.attn_groups
            of_step = attention.metadata([step])[0][group.layer_names[0]]
            attention._groups = own
            of_runs = attention.metadata([runs])[0][group.layer_names[0]]
            return of_step.seq_lens.tolist(), of_runs.seq_lens.tolist(), own[0][0].layer_names
        finally:
            group.backend, group.metadata_builders = backend, builders

    of_step, of_runs, names = inside(engine, lengths)
    assert of_step == [8]
    assert of_runs == list(range(1, 200, 2))
    assert names


def test_requests_of_one_forward_have_their_own_blocks(engine: Engine) -> None:
    def tables(worker: Any) -> list[list[int]]:
        import torch

        from semkv_rag.connector.worker.model.paged import PagedKV
        from semkv_rag.connector.worker.model.scattered import ScatteredAttention
        from semkv_rag.connector.worker.model.slice import Slice

        runner = worker.model_runner
        attention = ScatteredAttention(runner, worker.vllm_config, PagedKV(runner, 32))
        first = Slice([1, 2, 3], torch.tensor([[7, 3]]), torch.tensor([0, 1, 40]))
        second = Slice([4], torch.tensor([[5]]), torch.tensor([2]))
        metadata, _ = attention.metadata([first, second])
        return next(iter(metadata.values())).block_table.tolist()

    assert inside(engine, tables) == [[7, 3], [7, 3], [5, 0]]
