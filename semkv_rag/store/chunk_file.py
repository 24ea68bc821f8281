"""Chunk files: one chunk's KV of one rank, written once and never changed.

`write_chunk` runs once per captured chunk (precompute and capture on the way). `ChunkFile` is opened
once per chunk and blend, and `layer` called once per layer: both are on the path to the first token.

The reader trusts nothing. Whatever was done to a file, the answer is a `ChunkFileError` in words:
the header is checked before it is parsed, sizes before memory is taken, and every tensor against its
checksum before it is handed out. Tensors are read, not mapped: reading from the page cache and
hashing takes no longer than hashing a map, and a file that is truncated meanwhile is an error here
and would be a SIGBUS there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from semkv_rag.errors import ChunkFileError, StoreError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store.header import (
    KINDS,
    MAX_HEADER_BYTES,
    ChunkHeader,
    TensorEntry,
    chunk_id,
    decode,
    dtype_name,
    encode,
    header_of,
    layer_names,
    raw_bytes,
)

TEMPORARY_SUFFIX = ".tmp"


def write_chunk(
    path: str | os.PathLike[str], header: ChunkHeader, layers: Sequence[tuple[Tensor, Tensor]]
) -> int:
    """Write a chunk file so that it is there whole or not at all; its size in bytes.

    Written under a temporary name in the same folder, synced, renamed, and the folder synced: once
    this returns the file survives a power cut. A killed writer leaves at most a temporary file,
    which `KVStore.verify` takes away. Folders are made as needed.

    Args:
        path: where it goes, as `KVStore.path` says; a file there is replaced.
        header: what the file says of itself.
        layers: K and V of every layer, each `[tokens, kv_heads, head_dim]`.

    Raises:
        StoreError: header and tensors do not fit each other.
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    path = Path(path)
    tensors = _tensors(header, layers)
    head = encode(header, tensors)
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


class ChunkFile:
    """A chunk file, open for reading; a context manager. May be used by several threads at once.

    Opening reads and checks the header and the tokens, not the KV. A file that is removed or replaced
    while open stays readable as it was.

    Args:
        path: the file.
        model: fingerprint of the model that must have written it; None accepts any.
        chunk_id: the chunk that it must hold; None accepts any.

    Attributes:
        header: what the file says of itself.
        path: the file.
        size_bytes: its size.

    Raises:
        ChunkFileError: it is missing, torn, altered, or another model's or chunk's.
        StoreVersionError: a newer version wrote it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None,
        chunk_id: str | None = None,
    ) -> None:
        self.path = Path(path)
        try:
            # Looked at before it is opened: opening a pipe would wait for its writer.
            if not self.path.is_file():
                what = "is not a file" if self.path.exists() else "is missing"
                raise ChunkFileError(f"chunk file {self.path.name} {what}")
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        try:
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            self._entries: dict[str, TensorEntry] = {}
            self._data_begin = 0
            self.header = self._read_header()
            if model is not None and self.header.model != model:
                raise self._error(f"was written by another model ({self.header.model[:16]})")
            if chunk_id is not None and self.header.id != chunk_id:
                raise self._error(f"holds another chunk ({self.header.id[:16]})")
        except BaseException:
            self._file.close()
            raise

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each `[tokens, kv_heads, head_dim]` on the CPU, checksums verified.

        The tensors own their memory: they stay valid after `close`.

        Raises:
            ChunkFileError: the bytes are not those that were written, or there is no such layer.
        """
        if not 0 <= index < self.header.layers:
            raise self._error(f"has no layer {index}: it holds {self.header.layers}")
        key, value = layer_names(index)
        return self._tensor(key), self._tensor(value)

    def verify(self) -> None:
        """Read every tensor and compare its checksum.

        Raises:
            ChunkFileError: one differs.
        """
        for index in range(self.header.layers):
            self.layer(index)

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_header(self) -> ChunkHeader:
        if self.size_bytes < 8:
            raise self._error(f"is torn: {self.size_bytes} bytes are less than any header")
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, self.size_bytes - 8):
            raise self._error(f"is torn or altered: its header would be {length} bytes long")
        self._data_begin = 8 + length
        try:
            metadata, self._entries = decode(
                self._read_bytes(8, length), self.size_bytes - self._data_begin
            )
            return header_of(metadata, self._token_array("tokens"), self._token_array("context"))
        except ChunkFileError as error:
            raise self._error(f"cannot be used: {error}") from error

    def _token_array(self, name: str) -> TokenArray:
        return token_array(self._tensor(name).numpy())

    def _tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        buffer = raw_bytes(tensor)
        self._read(self._data_begin + entry.begin, buffer)
        if xxh3_64_hexdigest(buffer) != entry.checksum:
            raise self._error(f"was altered: the checksum of {name} differs")
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

    def _error(self, text: str) -> ChunkFileError:
        return ChunkFileError(f"chunk file {self.path.name} {text}")


def _tensors(header: ChunkHeader, layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """All tensors of a file by name, in file order, checked against the header."""
    if header.id != chunk_id(header.model, header.namespace, header.context, header.tokens):
        raise StoreError(f"chunk {header.id[:16]}: the id is not that of its tokens")
    if header.kind not in KINDS or not 0 <= header.rank < header.world_size:
        raise StoreError(f"chunk {header.id[:16]}: kind or rank cannot be")
    if len(layers) != header.layers or not layers or not len(header.tokens):
        raise StoreError(f"chunk {header.id[:16]}: it has {len(layers)} layers of {header.layers}")
    tensors = {
        "tokens": torch.from_numpy(token_array(header.tokens).copy()),
        "context": torch.from_numpy(token_array(header.context).copy()),
    }
    for index, pair in enumerate(layers):
        for name, tensor in zip(layer_names(index), pair, strict=True):
            fits = tensor.ndim == 3 and tensor.shape[0] == len(header.tokens)
            if not fits or dtype_name(tensor.dtype) != header.dtype:
                raise StoreError(
                    f"chunk {header.id[:16]}: {name} is {list(tensor.shape)} {tensor.dtype}, not"
                    f" [{len(header.tokens)}, kv_heads, head_dim] {header.dtype}"
                )
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


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
