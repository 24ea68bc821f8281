"""Which windows a segment can hold at all: a filter in memory before entries that may lie in a file.

It is a blocked Bloom filter of 64-bit words, with 16 bits for each window. A window sets four bits of the
one word that its hash names. One in 250 windows that are not there passes the filter.
"""

from __future__ import annotations

import numpy as np

from semkv_rag.reuse.windows import Hashes, IntArray

_PER_WORD = 4
"""Windows for each word of 64 bits."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ONE, _SIX, _HALF = np.uint64(1), np.uint64(63), np.uint64(32)


def scaled(hashes: Hashes, count: int) -> IntArray:
    """Which of `count` equal parts of all hashes each lies in, by its leading 32 bits; rises with it."""
    parts: IntArray = (((hashes >> _HALF) * np.uint64(count)) >> _HALF).astype(np.int64)
    return parts


def masks_of(hashes: Hashes, unused_bits: int) -> Hashes:
    """The bits that each window sets in its word.

    Args:
        unused_bits: so many of a hash's last bits are not known of stored windows.
    """
    spread = (hashes >> np.uint64(unused_bits)) * _SPREAD
    masks = np.zeros_like(spread)
    for shift in (58, 52, 46, 40):
        masks |= _ONE << ((spread >> np.uint64(shift)) & _SIX)
    return masks


def filter_of(hashes: Hashes, masks: Hashes) -> Hashes:
    """The filter of these windows, sorted by hash, [words]."""
    words = np.zeros(words_for(len(hashes)), dtype=np.uint64)
    places = scaled(hashes, len(words))
    firsts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    words[places[firsts]] = np.bitwise_or.reduceat(masks, firsts)
    return words


def words_for(windows: int) -> int:
    """The words of a filter of so many windows."""
    return max(1, windows // _PER_WORD)
