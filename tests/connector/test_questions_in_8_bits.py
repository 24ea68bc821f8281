"""Queries that vLLM has quantised for an 8-bit cache count with their scale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from semkv_rag.connector.worker.model.layer import unquantised

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([[0.25], [4.0]])])
def test_they_are_what_was_quantised(scale: torch.Tensor) -> None:
    tokens, heads, head_dim = 3, 4, 8
    queries = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(0))
    of_head = scale.flatten().repeat_interleave(heads // scale.numel())[:, None]
    quantised = (queries / of_head).to(FP8)
    read = unquantised(SimpleNamespace(_q_scale=scale), quantised)
    assert read.dtype == torch.float32
    assert torch.allclose(read, queries, rtol=0.07, atol=0.02)


def test_others_are_left_alone() -> None:
    queries = torch.ones(2, 2, 4, dtype=torch.bfloat16)
    assert unquantised(SimpleNamespace(), queries) is queries
