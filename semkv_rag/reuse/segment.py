"""A sorted part of the index: which chunks hold a window, and where.

Segments are never changed but for removals, which only mark chunks. `ChunkIndex` adds by writing a
new segment and merging the small ones, so each window is moved a logarithmic number of times.

A window is one 64-bit entry: the high 39 bits of its hash over its ordinal, which counts the windows
of the segment's chunks in the order the chunks were added. Sorting the entries sorts windows of equal
hash by age. A directory over the leading hash bits, one 32-bit slot for four entries, narrows a
search to a few neighbouring entries: two cache misses instead of twenty. Beside it are 16 bits for
each slot that tell which values of the next four hash bits are there at all: they end three of four
searches for a window that is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse.windows import Hashes, IntArray, ragged

_ORDINAL_BITS = 25
_ORDINAL = np.uint64((1 << _ORDINAL_BITS) - 1)
_ENTRIES_PER_SLOT = 4

MAX_WINDOWS = (1 << _ORDINAL_BITS) - 1
"""Windows a segment can hold, those of 330,000 chunks of 512 tokens. The last ordinal is no window's,
so that a search for it finds the end of a hash's entries."""

_WIDE = 32
"""Entries in a slot that only many places with one hash explain."""

_SCAN = 1 << 17
"""Entries that a look-up may go through in all to find live windows behind removed ones."""

UIntArray: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Found:
    """Windows found by hash: [windows] each, in the order of the hashes, then by age.

    Attributes:
        keys: which of the hashes.
        numbers: the chunk's number in the index.
        lengths: the chunk's tokens.
        ordinals: which of the chunk's windows.
        more: whether there are more windows than were looked at, [hashes].
    """

    keys: IntArray
    numbers: IntArray
    lengths: IntArray
    ordinals: IntArray
    more: NDArray[np.bool_]


class Segment:
    """Some chunks' windows, sorted by hash.

    Args:
        entries: hash bits over ordinals, sorted, [windows].
        numbers: the chunks' numbers in the index, rising with age, [chunks].
        lengths: the chunks' tokens, [chunks].
        counts: how many windows each chunk has, [chunks].
    """

    def __init__(
        self, entries: Hashes, numbers: UIntArray, lengths: UIntArray, counts: UIntArray
    ) -> None:
        self._entries = entries
        self.numbers = numbers
        self.lengths = lengths
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)
        self._live = np.ones(len(numbers), dtype=np.bool_)
        self._dead_windows = 0

    @classmethod
    def build(
        cls, hashes: Hashes, numbers: UIntArray, lengths: UIntArray, counts: UIntArray
    ) -> Segment:
        """A segment of new chunks; `hashes` are their windows', in the chunks' order."""
        entries = (hashes & ~_ORDINAL) | np.arange(len(hashes), dtype=np.uint64)
        entries.sort()
        return cls(entries, numbers, lengths, counts)

    @classmethod
    def merged(cls, segments: Sequence[Segment]) -> Segment:
        """One segment in place of `segments`, oldest first, without the removed chunks."""
        parts: list[Hashes] = []
        first = 0
        for segment in segments:
            parts.append(segment._live_entries(first))
            first += len(parts[-1])
        entries = np.concatenate(parts)
        entries.sort(kind="stable")  # merges the sorted parts in one pass
        return cls(
            entries,
            np.concatenate([segment.numbers[segment._live] for segment in segments]),
            np.concatenate([segment.lengths[segment._live] for segment in segments]),
            np.concatenate([np.diff(segment._starts)[segment._live] for segment in segments]),
        )

    def __len__(self) -> int:
        """Windows, those of removed chunks included."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        arrays = (self._entries, self.numbers, self.lengths, self._starts, self._live)
        return sum(array.nbytes for array in (*arrays, self._directory, self._present))

    @property
    def dead_share(self) -> float:
        """The share of the windows whose chunk was removed."""
        return self._dead_windows / len(self._entries)

    def remove(self, number: int) -> None:
        """Never find this chunk again."""
        index = int(np.searchsorted(self.numbers, number))
        self._live[index] = False
        self._dead_windows += int(self._starts[index + 1]) - int(self._starts[index])

    def oldest(self, hashes: Hashes, most: int) -> Found:
        """The oldest live windows with these hashes, at least `most` of each where there are."""
        first, counts = self._find(hashes)
        looked = np.minimum(counts, most)
        found = self._live_windows(first, looked)
        if self._dead_windows:
            short = np.bincount(found.keys, minlength=len(hashes)) < looked
            short &= looked < counts
            if (places := int(short.sum())) > 0:  # removed ones stand before the live ones
                looked[short] = np.minimum(counts[short], max(most, _SCAN // places))
                found = self._live_windows(first, looked)
        return replace(found, more=looked < counts)

    def _find(self, hashes: Hashes) -> tuple[IntArray, IntArray]:
        """Where the windows with these hashes stand: first entry and how many, [hashes] each."""
        first = np.zeros(len(hashes), dtype=np.int64)
        counts = np.zeros(len(hashes), dtype=np.int64)
        slots = (hashes >> self._slot_shift).astype(np.int64)
        nibbles = ((hashes >> (self._slot_shift - np.uint64(4))) & np.uint64(15)).astype(np.uint16)
        maybe = np.flatnonzero((self._present.take(slots) >> nibbles) & np.uint16(1))
        keys, slots = hashes[maybe] & ~_ORDINAL, slots[maybe]
        slot_end = self._directory.take(slots + 1).astype(np.int64)
        at = self._search(keys, self._directory.take(slots).astype(np.int64), slot_end)
        held = np.flatnonzero(self._entries.take(at, mode="clip") & ~_ORDINAL == keys)
        found = maybe[held]
        first[found] = at[held]
        counts[found] = self._search(keys[held] | _ORDINAL, at[held], slot_end[held]) - at[held]
        return first, counts

    def _live_windows(self, first: IntArray, counts: IntArray) -> Found:
        """The windows of `counts[i]` entries from `first[i]` on, but for removed chunks'."""
        keys = np.repeat(np.arange(len(counts)), counts)
        ordinals = (self._entries[ragged(first, counts)] & _ORDINAL).astype(np.uint32)
        chunks = np.searchsorted(self._starts, ordinals, side="right") - 1
        live = self._live[chunks]
        keys, ordinals, chunks = keys[live], ordinals[live], chunks[live]
        return Found(
            keys,
            self.numbers[chunks].astype(np.int64),
            self.lengths[chunks].astype(np.int64),
            (ordinals - self._starts[chunks]).astype(np.int64),
            np.zeros(len(counts), dtype=np.bool_),
        )

    def _search(self, keys: Hashes, first: IntArray, end: IntArray) -> IntArray:
        """Binary search for all keys at once: the first entry from `first` on that is not below.

        Each step halves all ranges; those done already are left as they are by adding nothing.
        """
        size = end - first
        wide = size > _WIDE
        if wide.any() and not wide.all():  # a boilerplate window: not all need its many steps
            found = np.empty_like(first)
            for part in (wide, ~wide):
                found[part] = self._search(keys[part], first[part], end[part])
            return found
        while size.any():
            half = (size + 1) >> 1
            first = first + half * (self._entries[first + half - 1] < keys)
            size = size - half
        return first

    @property
    def _slot_shift(self) -> np.uint64:
        bits = max(1, (len(self._entries) // _ENTRIES_PER_SLOT).bit_length() - 1)
        return np.uint64(64 - bits)

    @cached_property
    def _directory(self) -> UIntArray:
        """The first entry of each slot, and the end of the last one, [slots + 1]."""
        bounds = np.arange(1 << (64 - int(self._slot_shift)), dtype=np.uint64) << self._slot_shift
        first = np.searchsorted(self._entries, bounds)
        return np.append(first, len(self._entries)).astype(np.uint32)

    @cached_property
    def _present(self) -> NDArray[np.uint16]:
        """Which of the next 4 hash bits' values each slot holds, one bit for each, [slots]."""
        values = np.zeros(16 * (len(self._directory) - 1), dtype=np.bool_)
        values[self._entries >> (self._slot_shift - np.uint64(4))] = True
        return np.packbits(values, bitorder="little").view("<u2")

    def _live_entries(self, first: int) -> Hashes:
        """The entries of chunks that are not removed, their ordinals counted from `first`."""
        if self._live.all():
            return self._entries + np.uint64(first)
        kept = np.repeat(self._live, np.diff(self._starts))
        ordinals = np.cumsum(kept).astype(np.uint64) + np.uint64(first) - np.uint64(1)
        old = (self._entries & _ORDINAL).astype(np.int64)
        chosen = kept[old]
        return (self._entries[chosen] & ~_ORDINAL) | ordinals[old[chosen]]
