"""The kernel that loads stored KV against torch, in Triton's interpreter."""

from __future__ import annotations

import pytest

from semkv_rag.store.codecs import codec_names
from workbench.interpreted import interpreted

pytestmark = [pytest.mark.soak]


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize(
    "case",
    [
        "float32 heads=3 dim=64 block_size=16",
        "float32 heads=1 dim=80 block_size=32 rotary=32 interleaved=1",
        "float16 heads=2 dim=128 block_size=16",
        "float32 heads=2 dim=12 block_size=48",
        "float16 heads=1 dim=256 block_size=16",
    ],
)
def test_loaded_kv_is_what_torch_decodes_and_moves(codec: str, case: str) -> None:
    interpreted("-m", "workbench.load_kernel_check", *case.split(), f"codec={codec}")


def test_an_engine_blends_with_it() -> None:
    test = "tests/connector/test_kernel_loading.py"
    assert "5 passed" in interpreted("-m", "pytest", "-q", test, timeout_s=600)
