"""Chunks whose windows lie in a file: what an index begins with, so that no token is read at its start.

In memory are the filter and the directory of the segment, and for each chunk its length and the place of
its first window: some 60 bytes a chunk. Entries and ids are read from the file where a prompt hits them.

What the file holds is taken for no more than a hint, whoever wrote it: sizes are checked when it is
opened, places before anything is read there, and whatever is found is compared with the stored tokens.
This module does no I/O: `Sections` are the caller's.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse.presence import words_for
from semkv_rag.reuse.segment import MAX_WINDOWS, Segment, slots_for
from semkv_rag.reuse.windows import Hashes, IntArray, window_counts

ENTRIES: Final = "entries"
FILTER: Final = "filter"
DIRECTORY: Final = "directory"
LENGTHS: Final = "lengths"
IDS: Final = "ids"
PREFIXES: Final = "prefixes"
BY_ID: Final = "by_id"

_DTYPES: Final = {
    **dict.fromkeys((ENTRIES, FILTER, PREFIXES), "<u8"),
    **dict.fromkeys((DIRECTORY, LENGTHS, BY_ID), "<u4"),
    IDS: "u1",
}
SECTIONS: Final = tuple(_DTYPES)

_ID: Final = re.compile(r"[0-9a-f]{64}")
_ID_BYTES: Final = 32
_FEW: Final = 32
"""Ids that are looked for one by one; for more of them all prefixes are read at once."""


class Sections(Protocol):
    """The sections of a file, by name."""

    def size(self, name: str) -> int:
        """Bytes of a section."""
        ...

    def load(self, name: str) -> memoryview:
        """A whole section, its checksum compared."""
        ...

    def read(self, name: str, offset: int, count: int) -> bytes:
        """`count` bytes of a section from `offset` on, which lie in it."""
        ...


class _EntriesInFile:
    """`segment.Entries` of a file."""

    nbytes = 0

    def __init__(self, sections: Sections) -> None:
        self._read = sections.read
        self._count = sections.size(ENTRIES) // 8

    def __len__(self) -> int:
        return self._count

    def read(self, firsts: IntArray, counts: IntArray) -> Hashes:
        read = self._read
        pieces = [
            read(ENTRIES, 8 * first, 8 * count)
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
        ]
        return np.frombuffer(b"".join(pieces), "<u8")


class _Column(Sequence[int]):
    """Numbers of a section, read one by one."""

    def __init__(self, sections: Sections, name: str) -> None:
        self._sections = sections
        self._name = name
        self._bytes = np.dtype(_DTYPES[name]).itemsize

    def __len__(self) -> int:
        return self._sections.size(self._name) // self._bytes

    def __getitem__(self, place: Any) -> Any:
        read = self._sections.read(self._name, place * self._bytes, self._bytes)
        return int.from_bytes(read, "little")


class Base:
    """The chunks of a file, numbered from 0 on by age.

    Args:
        sections: the file's.
        window: tokens of an indexed window.

    Raises:
        ValueError: the sections do not belong together. What `sections` raise, this raises.
    """

    def __init__(self, sections: Sections, window: int) -> None:
        self._sections = sections
        # Before any memory is taken that a forged size could make large.
        if not sections.size(LENGTHS) // 4 <= sections.size(ENTRIES) // 8 <= MAX_WINDOWS:
            raise ValueError("it has more chunks than windows, or too many")
        lengths = self._array(LENGTHS)
        counts = window_counts(lengths.astype(np.int64), window)
        windows = int(counts.sum())
        chunks = len(lengths)
        expected = {
            ENTRIES: windows,
            FILTER: words_for(windows),
            DIRECTORY: slots_for(windows) + 1,
            LENGTHS: chunks,
            IDS: chunks * _ID_BYTES,
            PREFIXES: chunks,
            BY_ID: chunks,
        }
        for name, count in expected.items():
            if sections.size(name) != count * np.dtype(_DTYPES[name]).itemsize:
                raise ValueError(f"{name} is not as long as {chunks} chunks' is")
        directory = self._array(DIRECTORY)
        steps = directory[1:] >= directory[:-1]
        if not 0 < windows <= MAX_WINDOWS or not counts.all() or not steps.all():
            raise ValueError("it has windows that cannot be")
        if int(directory[-1]) != windows:
            raise ValueError("its directory does not end with its windows")
        self.segment = Segment(
            _EntriesInFile(sections),
            np.arange(chunks, dtype=np.uint32),
            lengths,
            counts,
            directory,
            self._array(FILTER),
        )

    def __len__(self) -> int:
        """Chunks, removed ones included."""
        return len(self.segment.numbers)

    @property
    def file_bytes(self) -> int:
        """Bytes of all sections."""
        return sum(self._sections.size(name) for name in SECTIONS)

    def id_of(self, number: int) -> str:
        """A chunk's id."""
        return self._sections.read(IDS, number * _ID_BYTES, _ID_BYTES).hex()

    def ids(self) -> NDArray[np.uint8]:
        """All ids, [chunks, 32]."""
        return self._array(IDS).reshape(-1, _ID_BYTES)

    def live_ids(self) -> list[str]:
        """The ids of the chunks that are not removed."""
        text = self.ids().tobytes().hex()
        size = 2 * _ID_BYTES
        live = self.segment.live_places.tolist()
        return [text[place * size : (place + 1) * size] for place in live]

    def live_numbers(self, ids: Sequence[str]) -> dict[str, int]:
        """The numbers of those of `ids` that are here and not removed."""
        ids = [id_ for id_ in ids if _ID.fullmatch(id_)]
        prefixes = [int(id_[:16], 16) for id_ in ids]
        places: Iterable[int]
        if len(ids) > _FEW:
            column = np.frombuffer(self._sections.read(PREFIXES, 0, 8 * len(self)), "<u8")
            places = np.searchsorted(column, np.array(prefixes, dtype=np.uint64)).tolist()
        else:
            few = _Column(self._sections, PREFIXES)
            places = [bisect_left(few, prefix) for prefix in prefixes]
        numbers = _Column(self._sections, BY_ID)
        found = {}
        for id_, place in zip(ids, places, strict=True):
            # Of two ids with the same prefix, which nobody has seen, one is not found here.
            number = numbers[place] if place < len(self) else len(self)
            here = number < len(self) and self.id_of(number) == id_
            if here and self.segment.is_live(number):
                found[id_] = number
        return found

    def _array(self, name: str) -> NDArray[Any]:
        return np.frombuffer(self._sections.load(name), _DTYPES[name])


def packed(
    base: Base | None, segments: Sequence[Segment], first: int, ids: Sequence[str | None]
) -> dict[str, NDArray[Any]] | None:
    """The sections of a file of these chunks, those that were removed left out.

    Takes seconds for a million chunks. Another thread may remove chunks meanwhile.

    Args:
        base: of the chunks below `first`.
        segments: all chunks' windows, oldest first.
        first: number of the first one that `base` does not have.
        ids: of those from `first` on; None where one was removed.

    Returns:
        None when there are none, or a file cannot hold that many, or an id is not 64 hex digits.
    """
    if not 0 < sum(map(len, segments)) <= MAX_WINDOWS:
        return None
    merged = Segment.merged(segments)
    kept = int(np.searchsorted(merged.numbers, first))
    later = [ids[number - first] or "" for number in merged.numbers[kept:].tolist()]
    if not len(merged) or not all(map(_ID.fullmatch, later)):
        return None
    raw = np.frombuffer(bytes.fromhex("".join(later)), np.uint8).reshape(-1, _ID_BYTES)
    if base is not None:
        raw = np.concatenate((base.ids()[merged.numbers[:kept]], raw))
    prefixes = raw[:, :8].copy().view(">u8").reshape(-1).astype("<u8")
    by_id = np.argsort(prefixes, kind="stable")
    arrays: dict[str, NDArray[Any]] = {
        ENTRIES: merged.all_entries(),
        FILTER: merged.filter,
        DIRECTORY: merged.directory,
        LENGTHS: merged.lengths,
        IDS: raw.reshape(-1),
        PREFIXES: prefixes[by_id],
        BY_ID: by_id,
    }
    return {name: array.astype(_DTYPES[name], copy=False) for name, array in arrays.items()}
