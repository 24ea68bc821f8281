"""Hashes of token windows: what the index is keyed by.

A stored chunk is indexed by the windows of `window` tokens that start at every `stride`-th token; a
prompt is probed with the windows at all of its offsets. A common run of `window + stride - 1` tokens
holds one indexed window wherever it starts in the chunk, so no such run is overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]
IntArray: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.signedinteger[Any]]
"""Token ids of any width: ids that no int32 can hold are compared too, and equal nothing stored."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def window_count(tokens: int, window: int, stride: int) -> int:
    """How many windows of a chunk of `tokens` tokens are indexed."""
    return 0 if tokens < window else (tokens - window) // stride + 1


def prompt_hashes(prompt: Tokens, window: int) -> Hashes:
    """The hash of the window at each offset, [len(prompt) - window + 1]."""
    return _hashes(prompt, np.arange(len(prompt) - window + 1), window)


def chunk_hashes(chunks: Sequence[Tokens], window: int, stride: int) -> Hashes:
    """The hashes of all indexed windows of `chunks`, one chunk after another."""
    lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    counts = np.maximum((lengths - window) // stride + 1, 0)
    begins = np.cumsum(lengths) - lengths
    return _hashes(np.concatenate(chunks), ragged(begins, counts, stride), window)


def ragged(begins: IntArray, counts: IntArray, step: int = 1) -> IntArray:
    """`begins[i]`, `begins[i] + step`, ... `counts[i]` of them, for each i in turn."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    values: IntArray = np.arange(total) * step + np.repeat(begins - (ends - counts) * step, counts)
    return values


def _hashes(tokens: Tokens, starts: IntArray, window: int) -> Hashes:
    """64-bit polynomial hashes of the windows at `starts`, mixed so that every bit counts."""
    ids = tokens.astype(np.int64).view(np.uint64)
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(window):
        hashes = hashes * _MULTIPLIER + ids[starts + offset]
    for shift, factor in zip((30, 27), _MIX, strict=True):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * factor
    return hashes ^ (hashes >> np.uint64(31))
