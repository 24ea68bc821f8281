"""The kernel that loads stored KV against torch, in Triton's interpreter (see test_row_kernel.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from semkv_rag.store.codecs import codec_names
from workbench.settings import ROOT

pytestmark = [pytest.mark.soak]
TRITON = ROOT / "build" / "triton"


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
    run = subprocess.run(
        [sys.executable, "-m", "workbench.load_kernel_check", *case.split(), f"codec={codec}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{TRITON}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_an_engine_blends_with_it() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/connector/test_kernel_loading.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TRITON)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 passed" in run.stdout
