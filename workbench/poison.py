"""Stored KV that no model computes, in files that are otherwise right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from semkv_rag.store import ChunkFile, write_chunk

VALUES: dict[str, float] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "huge": 3e38,
    "minus huge": -3e38,
    "large": 1e25,
    "denormal": 1e-42,
}


@contextmanager
def no_checks() -> Iterator[None]:
    """Whoever forges a file does not ask whether its values are numbers."""
    with mock.patch("semkv_rag.store.files.chunk_file.is_finite", return_value=True):
        yield


def poison(path: Path, value: float, layer: int, part: int, rows: slice) -> None:
    """Put a value into a chunk file, with right checksums.

    Args:
        layer: of its layers, from the end with a number below 0.
        part: 0 is K, 1 is V.
        rows: its tokens.
    """
    with ChunkFile(path, model=None) as file:
        header = file.header
        layers = [list(file.layer(index)) for index in range(header.layers)]
    spoilt = layers[layer][part].clone()
    spoilt[rows] = torch.full_like(spoilt[rows], value)
    layers[layer][part] = spoilt
    with no_checks():
        write_chunk(path, header, [(keys, values) for keys, values in layers])
