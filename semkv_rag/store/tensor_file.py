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
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from semkv_rag.closing import Closing
from semkv_rag.errors import StoreError, StoreVersionError
from semkv_rag.store.finite import is_finite, raw_bytes

MAX_HEADER_BYTES: Final = 4 << 20
TEMPORARY_SUFFIX: Final = ".tmp"

# The header checksum stands at a fixed place, so that it covers every byte behind it as it stands.
_PREFIX: Final = b'{"__metadata__":{"xxh3":"'
_DIGITS: Final = 16
_TAIL: Final = len(_PREFIX) + _DIGITS
_ALIGNMENT: Final = 64

_SAFETENSORS_NAMES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
_TORCH_NAMES: Final = {short: name for name, short in _SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor stands in the file's data section, and its checksum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of file of tensors.

    Attributes:
        name: as it stands in the header.
        version: the newest that can be read, and the one that is written.
        noun: what a person calls such a file.
        error: what is raised about it.
    """

    name: str
    version: int
    noun: str
    error: type[StoreError]


def write_tensors(
    path: Path,
    file_format: FileFormat,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> int:
    """Write a file so that it is there whole or not at all; its size in bytes.

    Written under a temporary name in the same folder, synced, renamed, and the folder synced: once
    this returns the file survives a power cut. A killed writer leaves at most a temporary file,
    which `KVStore.verify` takes away. Folders are made as needed.

    Args:
        path: where it goes; a file there is replaced.
        metadata: what the file says of itself.
        tensors: contiguous CPU tensors by name, in the order in which they follow.

    Raises:
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    head = _encode(file_format, metadata, tensors)
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            file.write(head)
            for tensor in tensors.values():
                file.write(raw_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return size


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
            # Looked at before it is opened: opening a pipe would wait for its writer.
            if not self.path.is_file():
                what = "is not a file" if self.path.exists() else "is missing"
                raise self._error(what)
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        try:
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            self._entries: dict[str, TensorEntry] = {}
            self._data_begin = 0
            self._take_header(self._read_header())
        except BaseException:
            self._file.close()
            raise

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
        for name in self._entries:
            self._tensor(name)

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
        if not text.startswith(_PREFIX):
            raise self._unusable(f"its header is not that of a {self.FORMAT.noun}")
        if xxh3_64_hexdigest(text[_TAIL:]).encode() != text[len(_PREFIX) : _TAIL]:
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
                raise StoreVersionError(
                    f"a {self.FORMAT.noun} of format {metadata['format_version']} was written by a"
                    f" newer version of semkv-rag: this one reads up to {self.FORMAT.version}"
                )
            entries = {name: _entry(name, value, metadata) for name, value in document.items()}
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
            if min(entry.shape) < 0 or (entry.begin, entry.end) != (offset, offset + size):
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
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        buffer = raw_bytes(tensor)
        self._read(self._data_begin + entry.begin, buffer)
        if xxh3_64_hexdigest(buffer) != entry.checksum:
            raise self._error(f"was altered: the checksum of {name} differs")
        if not is_finite(tensor, buffer):
            raise self._error(f"holds NaN or infinity in {name}")
        return tensor

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
        return self.FORMAT.error(f"{self.FORMAT.noun} {self.path.name} {text}")


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype that a file can hold.

    Raises:
        StoreError: it cannot hold it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _SAFETENSORS_NAMES:
        raise StoreError(f"a file of the store cannot hold {name}")
    return name


def _encode(
    file_format: FileFormat, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> bytes:
    """The file's bytes in front of its data section: length prefix and JSON, padded."""
    entries: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        checksums[f"xxh3:{name}"] = xxh3_64_hexdigest(raw_bytes(tensor))
        offset = end
    about = {
        "xxh3": "0" * _DIGITS,
        "format": file_format.name,
        "format_version": str(file_format.version),
        **metadata,
        **checksums,
    }
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    tail = text[_TAIL:] + b" " * (-(8 + len(text)) % _ALIGNMENT)
    length = (_TAIL + len(tail)).to_bytes(8, "little")
    return length + _PREFIX + xxh3_64_hexdigest(tail).encode() + tail


def _entry(name: str, value: Mapping[str, Any], metadata: Mapping[str, str]) -> TensorEntry:
    begin, end = value["data_offsets"]
    return TensorEntry(
        dtype=getattr(torch, _TORCH_NAMES[value["dtype"]]),
        shape=tuple(int(size) for size in value["shape"]),
        begin=int(begin),
        end=int(end),
        checksum=metadata[f"xxh3:{name}"],
    )


def _make_folder(folder: Path) -> None:
    """Like mkdir -p, and the new names survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
