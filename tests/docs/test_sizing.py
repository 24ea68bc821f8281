"""The sizes that docs/sizing.md tells are those of the files that the store writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semkv_rag.reuse.tokens import token_array
from semkv_rag.store import chunk_id
from semkv_rag.store.files.chunk_file import write_chunk
from semkv_rag.store.files.header import ChunkHeader
from workbench.pages import tables
from workbench.settings import ROOT

TOKENS = 512
SIZES = tables(ROOT / "docs" / "sizing.md", "Disk")[0]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: f"{row[0]} {row[4]}")
def test_bytes_of_a_token(row: list[str], tmp_path: Path) -> None:
    layers, heads, width = (int(cell) for cell in row[1:4])
    dtype, (token, stored) = row[4], (int(cell.replace(",", "")) for cell in row[5:])
    tokens, context = token_array(range(TOKENS)), token_array(range(200))
    header = ChunkHeader(
        chunk_id("m", "default", context, tokens),
        "m",
        "default",
        "document",
        tokens,
        context,
        dtype,
        layers,
    )
    numbers = torch.zeros(TOKENS, heads, width, dtype=getattr(torch, dtype))
    path = tmp_path / "chunk.safetensors"
    behind_prefix = write_chunk(path, header, [(numbers, numbers)] * layers)
    behind_left = write_chunk(
        path, header, [(numbers, numbers)] * layers, torch.zeros(layers, TOKENS, dtype=torch.uint8)
    )
    assert 0 <= behind_prefix - TOKENS * token < 0.01 * TOKENS * token
    assert 0 <= behind_prefix + behind_left - TOKENS * stored < 0.01 * TOKENS * stored


def test_the_examples_follow_from_the_table() -> None:
    by_model = {(row[0], row[4]): [int(cell.replace(",", "")) for cell in row[5:]] for row in SIZES}
    qwen, smol = by_model["Qwen3-8B", "bfloat16"], by_model["SmolLM2-135M", "bfloat16"]
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert f"{round(500_000 * qwen[1] / 1e9)} GB for Qwen3-8B" in text
    assert f"{round(500_000 * smol[1] / 1e9)} GB for SmolLM2-135M" in text
    assert f"{round(4_000 * qwen[0] / 1e6)} MB to read" in text
    assert f"| {4128 / 13.986 * smol[0] / 1e6:.1f} MB/s |" in text
    assert f"| {10_000 * qwen[0] / 1e6:,.0f} MB/s |" in text
