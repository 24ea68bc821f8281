"""The kernel for scattered rows against dense attention, in Triton's interpreter."""

from __future__ import annotations

import pytest

from workbench.interpreted import interpreted

pytestmark = [pytest.mark.soak]


@pytest.mark.parametrize(
    "case",
    [
        "float32 heads=9 kv_heads=3 dim=64 value_dim=64 block_size=16",
        "float32 heads=8 kv_heads=8 dim=80 value_dim=80 block_size=32 turned=1",
        "float16 heads=14 kv_heads=2 dim=64 value_dim=64 block_size=128",
        "float32 heads=4 kv_heads=1 dim=32 value_dim=48 block_size=16 turned=1 softcap=5",
        "float32 heads=4 kv_heads=2 dim=32 value_dim=32 block_size=16 window=21",
        "float16 heads=4 kv_heads=2 dim=64 value_dim=64 block_size=128 window=1",
        "float32 heads=8 kv_heads=2 dim=64 value_dim=64 block_size=32 window=1000 sinks=1",
        "float32 heads=8 kv_heads=1 dim=64 value_dim=64 block_size=16 window=40 sinks=1",
    ],
)
def test_rows_attend_as_in_dense_attention(case: str) -> None:
    interpreted("-m", "workbench.row_kernel_check", *case.split())
