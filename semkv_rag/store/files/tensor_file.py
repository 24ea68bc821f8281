"""Files of tensors, written once and never changed: what chunk files and state files have in common.

Such a file is a safetensors file, so its header is an 8-byte length and a JSON text. The header is
written and read here rather than by the safetensors package for what that package does not offer: a
checksum that is checked before any JSON is parsed, errors that keep their errno, files with the
permissions of the umask, and tensors read into memory of their own instead of a map that kills the
process when somebody truncates the file. docs/store.md is the specification.

The reader trusts nothing. Whatever was done to a file, the answer is an error in words: the header is
checked before it is parsed, sizes before memory is taken, and every tensor against its checksum before
it is handed out. Tensors are read, not mapped: reading from the page cache and hashing takes no longer
than hashing a map, and a file that is truncated meanwhile is an error here and would be a SIGBUS there.
"""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from semkv_rag.closing import Closing
from semkv_rag.errors import StoreError, StoreVersionError
from semkv_rag.store.files.beneath import NotAFileError, open_file
from semkv_rag.store.files.finite import KnownFinite, identity_of, is_finite, raw_bytes
from semkv_rag.store.files.tensor_format import PREFIX, SAFETENSORS_NAMES, TAIL, FileFormat

MAX_HEADER_BYTES: Final = 4 << 20
_MAX_SIDE: Final = (1 << 31) - 1
"""The longest side of a tensor that torch and the index can hold, also where another side is 0."""
_PIECE_BYTES: Final = 16 << 20
_LONGEST_TEXT: Final = 500
"""Characters of an error that quotes a file; its header may have millions."""

_TORCH_NAMES: Final = {short: name for name, short in SAFETENSORS_NAMES.items()}

_KNOWN: Final = KnownFinite()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor stands in the file's data section, and its checksum.

    Attributes:
        bit: of the tensor among those of the file.
    """

    bit: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


class TensorFile(Closing):
    """A file of tensors, open for reading; a context manager. May be used by several threads at once.

    Opening reads and checks the header. A file that is removed or replaced while open stays readable
    as it was.

    Attributes:
        path: the file.
        size_bytes: its size.
    """

    FORMAT: ClassVar[FileFormat]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self._descriptor(), "rb", buffering=0)  # noqa: PTH123, SIM115 - a handle, closed by close
        except FileNotFoundError:
            raise self._error("is missing") from None
        except NotAFileError as error:
            raise self._error(str(error.strerror)) from None
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        try:
            stat = os.fstat(self._file.fileno())
            self.size_bytes = stat.st_size
            self._identity = identity_of(stat)
            self._finite = 0 if self._identity is None else _KNOWN.of(self._identity)
            self._entries: dict[str, TensorEntry] = {}
            self._data_begin = 0
            self._take_header(self._read_header())
        except BaseException:
            self._file.close()
            raise

    def _descriptor(self) -> int:
        """The file, opened: whoever reads it from elsewhere says how."""
        return open_file(self.path)

    @abstractmethod
    def _check_entries(
        self, metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        """Raise the format's error when the tensors are not those that such a file has."""

    @abstractmethod
    def _take_header(self, metadata: Mapping[str, str]) -> None:
        """Keep what the file says of itself, or raise the format's error when it cannot be."""

    def verify(self) -> None:
        """Read every tensor, compare its checksum, and look for NaN and infinity.

        Raises:
            StoreError: one differs or is not finite; the format's own error.
        """
        for name, entry in self._entries.items():
            hasher, finite = xxh3_64(), True
            # Piece by piece: a forged file's tensor may be larger than the memory.
            for begin in range(entry.begin, entry.end, _PIECE_BYTES):
                count = min(_PIECE_BYTES, entry.end - begin) // entry.dtype.itemsize
                piece, content = self._numbers(entry.dtype, (count,), begin)
                hasher.update(content)
                finite = finite and is_finite(piece, content)
            self._require_sound(name, hasher.hexdigest(), finite)

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _read_header(self) -> Mapping[str, str]:
        if self.size_bytes < 8:
            raise self._error(f"is torn: {self.size_bytes} bytes are less than any header")
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, self.size_bytes - 8):
            raise self._error(f"is torn or altered: its header would be {length} bytes long")
        self._data_begin = 8 + length
        metadata, self._entries = self._decode(self._read_bytes(8, length))
        return metadata

    def _decode(self, text: bytes) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        """The metadata and the tensors of a header's JSON text, checked against each other."""
        if not text.startswith(PREFIX):
            raise self._unusable(f"its header is not that of a {self.FORMAT.noun}")
        if xxh3_64_hexdigest(text[TAIL:]).encode() != text[len(PREFIX) : TAIL]:
            raise self._unusable("its header was altered: the checksum differs")
        try:
            document = json.loads(text)
            metadata: dict[str, str] = document.pop("__metadata__")
            if not all(isinstance(value, str) for value in metadata.values()):
                raise self._unusable("its metadata are not text")
            if metadata["format"] != self.FORMAT.name:
                raise self._unusable(
                    f"its format is {metadata['format']!r}, not {self.FORMAT.name!r}"
                )
            if int(metadata["format_version"]) > self.FORMAT.version:
                version = _shortened(metadata["format_version"])
                raise StoreVersionError(
                    f"a {self.FORMAT.noun} of format {version} was written by a newer version of"
                    f" semkv-rag: this one reads up to {self.FORMAT.version}"
                )
            entries = {
                name: _entry(name, 1 << place, value, metadata)
                for place, (name, value) in enumerate(document.items())
            }
            self._check_entries(metadata, entries)
            self._check_extent(entries)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise self._unusable(f"its header cannot be understood: {error!r}") from error
        return metadata, entries

    def _check_extent(self, entries: Mapping[str, TensorEntry]) -> None:
        """The tensors stand one behind the other and fill the data section to its last byte."""
        offset = 0
        for name, entry in entries.items():
            size = entry.dtype.itemsize * math.prod(entry.shape)
            if (entry.begin, entry.end) != (offset, offset + size):
                raise self._unusable(f"its tensor {name} does not fit the header")
            offset = entry.end
        if offset != self.size_bytes - self._data_begin:
            raise self._unusable(
                f"it is torn: {self.size_bytes - self._data_begin} bytes of data where its header"
                f" says {offset}"
            )

    def _tensor(self, name: str) -> Tensor:
        """A tensor, on the CPU, in memory of its own, its checksum verified and all of it finite."""
        entry = self._entries[name]
        tensor, content = self._numbers(entry.dtype, entry.shape, entry.begin)
        self._verify(name, tensor, content)
        return tensor

    def _tensors_in(self, memory: Tensor, names: Sequence[str]) -> list[Tensor]:
        """Tensors that follow each other in the file, verified as `_tensor` does; read at once.

        Args:
            memory: [bytes], uint8, contiguous, on the CPU: as long as the tensors, which are views of it.
        """
        content = raw_bytes(memory)
        entries = [self._entries[name] for name in names]
        first = entries[0].begin
        self._read(self._data_begin + first, content)
        tensors = []
        for name, entry in zip(names, entries, strict=True):
            place = slice(entry.begin - first, entry.end - first)
            tensor = memory[place].view(entry.dtype).view(entry.shape)
            self._verify(name, tensor, content[place])
            tensors.append(tensor)
        return tensors

    def _verify(self, name: str, tensor: Tensor, content: memoryview) -> None:
        """Make sure that what was read of a tensor is what was written, and all of it finite."""
        bit = self._entries[name].bit
        known = bool(self._finite & bit)
        self._require_sound(name, xxh3_64_hexdigest(content), known or is_finite(tensor, content))
        if not known and self._identity is not None:
            _KNOWN.add(self._identity, bit)

    def _numbers(
        self, dtype: torch.dtype, shape: tuple[int, ...], begin: int
    ) -> tuple[Tensor, memoryview]:
        """What stands from `begin` of the data section on, and its memory."""
        try:
            tensor = torch.empty(shape, dtype=dtype)
        except RuntimeError as error:
            raise self._error("is larger than the memory that there is") from MemoryError(
                *error.args
            )
        content = raw_bytes(tensor)
        self._read(self._data_begin + begin, content)
        return tensor, content

    def _require_sound(self, name: str, checksum: str, finite: bool) -> None:
        if checksum != self._entries[name].checksum:
            raise self._error(f"was altered: the checksum of {name} differs")
        if not finite:
            raise self._error(f"holds NaN or infinity in {name}")

    def _read_bytes(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._read(offset, memoryview(buffer))
        return bytes(buffer)

    def _read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; in one call unless the system hands out less."""
        try:
            while buffer:
                count = os.preadv(self._file.fileno(), [buffer], offset)
                if count == 0:
                    raise self._error("is torn: it ends before its header says")
                buffer, offset = buffer[count:], offset + count
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise self._error(f"cannot be read: {error}") from error

    def _unusable(self, text: str) -> StoreError:
        return self._error(f"cannot be used: {text}")

    def _error(self, text: str) -> StoreError:
        return self.FORMAT.error(f"{self.FORMAT.noun} {self.path.name} {_shortened(text)}")


def _entry(
    name: str, bit: int, value: Mapping[str, Any], metadata: Mapping[str, str]
) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = value["shape"]
    # Not int(…) of whatever stands there: JSON has Infinity, true, "8" and 0.5, too.
    if not (
        isinstance(shape, list)
        and shape
        and all(type(side) is int for side in (*shape, begin, end))
    ):
        raise ValueError(f"the shape or the place of {name} is not in whole numbers")
    if min(shape) < 0 or max(shape) > _MAX_SIDE:
        raise ValueError(f"the shape of {name} cannot be one")
    return TensorEntry(
        bit=bit,
        dtype=getattr(torch, _TORCH_NAMES[value["dtype"]]),
        shape=tuple(shape),
        begin=begin,
        end=end,
        checksum=metadata[f"xxh3:{name}"],
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
