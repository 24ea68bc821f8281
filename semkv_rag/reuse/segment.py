"""A sorted part of the index: which chunks hold a window, and where.

Segments are never changed but for removals, which only mark chunks. `ChunkIndex` adds by writing a
new segment and merging the small ones, so each window is moved a logarithmic number of times.

A window is one 64-bit entry: the high 38 bits of its hash over its ordinal, which counts the windows
of the segment's chunks in the order the chunks were added. Sorting the entries sorts windows of equal
hash by age. A filter (`presence`) ends almost all searches for a window that is not stored; a directory
over the leading hash bits, one 32-bit slot for 16 entries, says which entries to read for the others.
The entries are in memory, or in a file of which only these are read (`base`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse.presence import filter_of, masks_of, scaled
from semkv_rag.reuse.windows import Hashes, IntArray, ragged

ORDINAL_BITS = 26
_ORDINAL = np.uint64((1 << ORDINAL_BITS) - 1)
_ENTRIES_PER_SLOT = 16

MAX_WINDOWS = (1 << ORDINAL_BITS) - 1
"""Windows a segment can hold, those of 3 million chunks of 512 tokens."""

_WIDE = 64
"""Entries in a slot that only many places with one hash explain."""

_SCAN = 1 << 17
"""Entries that a look-up may go through in all to find live windows behind removed ones."""

UIntArray: TypeAlias = NDArray[np.uint32]
BoolArray: TypeAlias = NDArray[np.bool_]


class Entries(Protocol):
    """Sorted entries, wherever they are."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        ...

    def read(self, firsts: IntArray, counts: IntArray) -> Hashes:
        """`counts[i]` entries from `firsts[i]` on, for each i in turn."""
        ...


class EntriesInMemory:
    """Entries as an array, [windows]."""

    def __init__(self, array: Hashes) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def read(self, firsts: IntArray, counts: IntArray) -> Hashes:
        if len(firsts) == 1:
            return self._array[int(firsts[0]) : int(firsts[0]) + int(counts[0])]
        return self._array[ragged(firsts, counts)]


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
    more: BoolArray

    def only(self, kept: BoolArray) -> Found:
        """Some of the windows."""
        return Found(
            self.keys[kept],
            self.numbers[kept],
            self.lengths[kept],
            self.ordinals[kept],
            self.more,
        )


class Segment:
    """Some chunks' windows, sorted by hash.

    Args:
        entries: hash bits over ordinals, sorted, [windows].
        numbers: the chunks' numbers in the index, rising with age, [chunks].
        lengths: the chunks' tokens, [chunks].
        counts: how many windows each chunk has, [chunks].
        directory, filter: as they were made from these entries before; made when needed by default.
    """

    def __init__(
        self,
        entries: Entries,
        numbers: UIntArray,
        lengths: UIntArray,
        counts: IntArray,
        directory: UIntArray | None = None,
        filter: Hashes | None = None,
    ) -> None:
        self._entries = entries
        self._directory = directory
        self._filter = filter
        self.numbers = numbers
        self.lengths = lengths
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)
        self._live = np.ones(len(numbers), dtype=np.bool_)
        self._dead_windows = 0

    @classmethod
    def build(
        cls, hashes: Hashes, numbers: UIntArray, lengths: UIntArray, counts: IntArray
    ) -> Segment:
        """A segment of new chunks; `hashes` are their windows', in the chunks' order."""
        entries = (hashes & ~_ORDINAL) | np.arange(len(hashes), dtype=np.uint64)
        entries.sort()
        return cls(EntriesInMemory(entries), numbers, lengths, counts)

    @classmethod
    def merged(cls, segments: Sequence[Segment]) -> Segment:
        """One segment in place of `segments`, oldest first, without the removed chunks."""
        parts: list[Hashes] = []
        kept: list[BoolArray] = []
        first = 0
        for segment in segments:
            live = segment._live.copy()  # another thread may remove chunks meanwhile
            parts.append(segment._live_entries(live, first))
            kept.append(live)
            first += len(parts[-1])
        entries = np.concatenate(parts)
        del parts
        entries.sort(kind="stable")  # merges the sorted parts in one pass
        pairs = list(zip(segments, kept, strict=True))
        return cls(
            EntriesInMemory(entries),
            np.concatenate([segment.numbers[live] for segment, live in pairs]),
            np.concatenate([segment.lengths[live] for segment, live in pairs]),
            np.concatenate([np.diff(segment._starts)[live] for segment, live in pairs]),
        )

    def __len__(self) -> int:
        """Windows, those of removed chunks included."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of memory; entries in a file are not among them."""
        arrays = (self.numbers, self.lengths, self._starts, self._live)
        return sum(array.nbytes for array in (*arrays, self.directory, self.filter, self._entries))

    @property
    def dead_share(self) -> float:
        """The share of the windows whose chunk was removed."""
        return self._dead_windows / len(self._entries)

    @property
    def live_places(self) -> IntArray:
        """Which of the segment's chunks are not removed."""
        return self._live.nonzero()[0]

    def all_entries(self) -> Hashes:
        """The entries, [windows]."""
        return self._entries.read(np.zeros(1, np.int64), np.array([len(self._entries)]))

    def is_live(self, number: int) -> bool:
        """Whether a chunk of the segment was not removed."""
        return bool(self._live[int(np.searchsorted(self.numbers, number))])

    def remove(self, number: int) -> None:
        """Never find this chunk again."""
        index = int(np.searchsorted(self.numbers, number))
        if self._live[index]:
            self._live[index] = False
            self._dead_windows += int(self._starts[index + 1]) - int(self._starts[index])

    def may_hold(self, hashes: Hashes, masks: Hashes) -> BoolArray:
        """Which windows may be there; false only of those that are not. `masks` are `masks_of` them."""
        held: BoolArray = (self.filter[scaled(hashes, len(self.filter))] & masks) == masks
        return held

    def oldest(self, hashes: Hashes, most: int) -> Found:
        """The oldest live windows with these hashes, at least `most` of each where there are.

        Args:
            hashes: sorted, each once.
        """
        maybe = self.may_hold(hashes, masks_of(hashes, ORDINAL_BITS)).nonzero()[0]
        slots = scaled(hashes[maybe], len(self.directory) - 1)
        first = self.directory[slots].astype(np.int64)
        size = self.directory[slots + 1].astype(np.int64) - first
        more = np.zeros(len(hashes), dtype=np.bool_)
        keys, ordinals = self._equal(hashes, maybe, first, np.minimum(size, _WIDE))[:2]
        wide = size > _WIDE  # read to their end, most of them for nothing, these would take long
        if wide.any():
            parted = maybe[wide]
            found = self._equal_in_wide(hashes, parted, first[wide], first[wide] + size[wide], most)
            more[parted] = found[2]
            narrow = ~np.isin(keys, parted)
            keys = np.concatenate((keys[narrow], found[0]))
            ordinals = np.concatenate((ordinals[narrow], found[1]))
            order = np.argsort(keys, kind="stable")
            keys, ordinals = keys[order], ordinals[order]
        keys, ordinals, chunks = self._live_ones(keys, ordinals)
        rank = np.arange(len(keys)) - np.searchsorted(keys, keys)
        more[keys[rank >= most]] = True
        kept = rank < most
        chunks = chunks[kept]
        return Found(
            keys[kept],
            self.numbers[chunks].astype(np.int64),
            self.lengths[chunks].astype(np.int64),
            ordinals[kept] - self._starts[chunks].astype(np.int64),
            more,
        )

    def _equal(
        self, hashes: Hashes, which: IntArray, first: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The entries with the hash `which[i]` among `counts[i]` entries from `first[i]` on.

        Returns:
            Their hashes; their ordinals; and how many entries have a smaller hash, [which].
        """
        read = self._entries.read(first, counts)
        owner = np.repeat(np.arange(len(which)), counts)
        wanted = (hashes[which] & ~_ORDINAL)[owner]
        below = np.bincount(owner[read < wanted], minlength=len(which))
        same = ((read & ~_ORDINAL) == wanted).nonzero()[0]
        return which[owner[same]], (read[same] & _ORDINAL).astype(np.int64), below

    def _equal_in_wide(
        self, hashes: Hashes, which: IntArray, first: IntArray, end: IntArray, most: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """`_equal` in slots that are not read as a whole; and where there may be more, [which]."""
        first = first + self._equal(hashes, which, first, np.full(len(which), _WIDE))[2]
        beyond = self._entry_below(hashes[which], first, end)
        if beyond.any():
            first[beyond] = self._search(hashes[which[beyond]], first[beyond], end[beyond])
        counts = np.minimum(end - first, most + 1)
        keys, ordinals, _ = self._equal(hashes, which, first, counts)
        if self._dead_windows:  # removed ones may stand before the live ones
            live = self._live_ones(keys, ordinals)[0]
            short = np.isin(which, keys) & (_count(live, which) < most) & (counts < end - first)
            if places := int(short.sum()):
                deep = max(most + 1, _SCAN // places)
                counts[short] = np.minimum((end - first)[short], deep)
                keys, ordinals, _ = self._equal(hashes, which, first, counts)
        all_equal = _count(keys, which) == counts
        return keys, ordinals, all_equal & (counts < end - first)

    def _entry_below(self, hashes: Hashes, at: IntArray, end: IntArray) -> BoolArray:
        """Whether there is an entry at each place, and it has a smaller hash."""
        there = at < end
        below = np.zeros(len(at), dtype=np.bool_)
        read = self._entries.read(at[there], np.ones(int(there.sum()), dtype=np.int64))
        below[there] = read < (hashes[there] & ~_ORDINAL)
        return below

    def _search(self, hashes: Hashes, first: IntArray, end: IntArray) -> IntArray:
        """Binary search for all at once: the first entry from `first` on that is not below."""
        while (open_ := first < end).any():
            middle = (first + end) >> 1
            below = open_ & self._entry_below(hashes, middle, end)
            first = np.where(below, middle + 1, first)
            end = np.where(open_ & ~below, middle, end)
        return first

    def _live_ones(self, keys: IntArray, ordinals: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The windows of chunks that are not removed, and their chunks."""
        # A file that somebody forged may hold any ordinal.
        known = ordinals < int(self._starts[-1])
        keys, ordinals = keys[known], ordinals[known]
        chunks: IntArray = np.searchsorted(self._starts, ordinals, side="right") - 1
        if not self._dead_windows:
            return keys, ordinals, chunks
        live = self._live[chunks]
        return keys[live], ordinals[live], chunks[live]

    @property
    def directory(self) -> UIntArray:
        """The first entry of each slot, and the end of the last one, [slots + 1]."""
        if self._directory is None:
            slots = slots_for(len(self._entries))
            bounds = -(-(np.arange(slots, dtype=np.int64) << 32) // slots) << 32
            first = np.searchsorted(self.all_entries(), bounds.view(np.uint64))
            self._directory = np.append(first, len(self._entries)).astype(np.uint32)
        return self._directory

    @property
    def filter(self) -> Hashes:
        """Which windows are there at all, see `presence`."""
        if self._filter is None:
            entries = self.all_entries()
            self._filter = filter_of(entries, masks_of(entries, ORDINAL_BITS))
        return self._filter

    def _live_entries(self, live: BoolArray, first: int) -> Hashes:
        """The entries of chunks that are not removed, their ordinals counted from `first`."""
        entries = self.all_entries()
        if live.all():
            return entries + np.uint64(first)
        kept = np.repeat(live, np.diff(self._starts))
        ordinals = np.cumsum(kept).astype(np.uint64) + np.uint64(first) - np.uint64(1)
        old = (entries & _ORDINAL).astype(np.int64)
        chosen = kept[old]
        return (entries[chosen] & ~_ORDINAL) | ordinals[old[chosen]]


def slots_for(windows: int) -> int:
    """The slots of a directory of so many windows."""
    return max(1, windows // _ENTRIES_PER_SLOT)


def _count(keys: IntArray, which: IntArray) -> IntArray:
    """How often each of `which`, which are sorted, is among the sorted `keys`."""
    counts: IntArray = np.searchsorted(keys, which, side="right") - np.searchsorted(keys, which)
    return counts
