"""Hashes of token windows: what the index is keyed by.

A stored chunk is indexed by the windows of `window` tokens that start at every so many tokens, its
stride; a prompt is probed with the windows at all of its offsets. A common run of `window + stride - 1`
tokens holds one indexed window wherever it starts in the chunk, so no such run is overlooked.

Long chunks have wider strides than short ones: none has more than some 21 windows, until the stride is
five times that of short ones. That bounds what an index weighs.
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

WIDEST = 5
"""Strides are 1 to so many times the shortest."""

_STEPS = 20
"""Strides of a chunk, before the next wider one is taken."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shortest_stride(window: int) -> int:
    """Tokens from one indexed window of a short chunk to its next."""
    return window // 2 + 1


def strides_of(lengths: IntArray, window: int) -> IntArray:
    """The strides of chunks of so many tokens.

    With windows of 8 tokens: 5 up to 112 tokens, 10 up to 212, 15 up to 312, 20 up to 412, else 25.
    """
    unit = shortest_stride(window)
    over = lengths - (window + unit - 1)
    strides: IntArray = unit * np.clip(-(-over // (_STEPS * unit)), 1, WIDEST)
    return strides


def window_counts(lengths: IntArray, window: int) -> IntArray:
    """How many windows of chunks of so many tokens are indexed."""
    counts: IntArray = np.maximum((lengths - window) // strides_of(lengths, window) + 1, 0)
    return counts


def prompt_hashes(prompt: Tokens, window: int) -> Hashes:
    """The hash of the window at each offset, [len(prompt) - window + 1]."""
    ids = prompt.astype(np.int64).view(np.uint64)
    count = len(ids) - window + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(window):
        hashes *= _MULTIPLIER
        hashes += ids[offset : offset + count]
    return _mixed(hashes)


def chunk_hashes(chunks: Sequence[Tokens], window: int) -> Hashes:
    """The hashes of all indexed windows of `chunks`, one chunk after another."""
    lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    counts = window_counts(lengths, window)
    begins = np.cumsum(lengths) - lengths
    starts = ragged(begins, counts, strides_of(lengths, window))
    ids = np.concatenate(chunks).astype(np.int64).view(np.uint64)
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(window):
        hashes = hashes * _MULTIPLIER + ids[starts + offset]
    return _mixed(hashes)


def ragged(begins: IntArray, counts: IntArray, steps: IntArray | int = 1) -> IntArray:
    """`begins[i]`, `begins[i] + steps[i]`, ... `counts[i]` of them, for each i in turn."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if isinstance(steps, np.ndarray):
        places = np.arange(total) - np.repeat(ends - counts, counts)
        stepped: IntArray = places * np.repeat(steps, counts) + np.repeat(begins, counts)
        return stepped
    values: IntArray = np.arange(total) * steps + np.repeat(
        begins - (ends - counts) * steps, counts
    )
    return values


def _mixed(hashes: Hashes) -> Hashes:
    """64-bit polynomial hashes, mixed so that every bit counts."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * factor
    return hashes ^ (hashes >> np.uint64(31))
