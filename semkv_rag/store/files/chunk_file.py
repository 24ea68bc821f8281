"""Chunk files: one chunk's KV of one rank, written once and never changed.

`write_chunk` runs once per captured chunk (precompute and capture on the way). `ChunkFile` is opened
once per chunk and blend, and `layer` called once per layer: both are on the path to the first token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from semkv_rag.errors import ChunkFileError, StoreError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store.codecs import Codec, EncodedLayer, codec_named
from semkv_rag.store.codecs.codec import HeadShape
from semkv_rag.store.files.finite import is_finite, raw_bytes
from semkv_rag.store.files.header import (
    FORMAT,
    MAX_TOKENS,
    SENSITIVITY,
    ChunkHeader,
    check_entries,
    codec_of,
    dtype_of,
    fault_of,
    format_of,
    header_of,
    layer_names,
    metadata_of,
)
from semkv_rag.store.files.tensor_file import TensorEntry, TensorFile
from semkv_rag.store.files.tensor_format import dtype_name
from semkv_rag.store.files.tensor_writer import write_tensors


def write_chunk(
    path: str | os.PathLike[str],
    header: ChunkHeader,
    layers: Sequence[tuple[Tensor, Tensor]],
    sensitivity: Tensor | None = None,
) -> int:
    """Write a chunk file so that it is there whole or not at all; its size in bytes.

    Args:
        path: where it goes, as `KVStore.path` says; a file there is replaced.
        header: what the file says of itself.
        layers: K and V of every layer, each `[tokens, kv_heads, head_dim]`, in the header's dtype. They
            are stored by its codec.
        sensitivity: `[layers, tokens]`, uint8, as `semkv_rag.blend.encoded` makes them, or None.

    Raises:
        StoreError: header and tensors do not fit each other, or a tensor holds NaN or infinity.
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    tensors = _tensors(header, layers, sensitivity)
    return write_tensors(Path(path), format_of(header), metadata_of(header), tensors)


class ChunkFile(TensorFile):
    """A chunk file, open for reading; a context manager. May be used by several threads at once.

    Opening reads and checks the header and the tokens, not the KV. A file that is removed or replaced
    while open stays readable as it was.

    Args:
        path: the file.
        model: fingerprint of the model that must have written it; None accepts any.
        chunk_id: the chunk that it must hold; None accepts any.

    Attributes:
        header: what the file says of itself.
        codec: the one it was written by.
        path: the file.
        size_bytes: its size.

    Raises:
        ChunkFileError: it is missing, torn, altered, or another model's or chunk's.
        StoreVersionError: a newer version wrote it.
    """

    FORMAT = FORMAT

    header: ChunkHeader
    codec: Codec
    _shapes: list[tuple[HeadShape, HeadShape]]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None,
        chunk_id: str | None = None,
    ) -> None:
        self._model = model
        self._chunk_id = chunk_id
        super().__init__(path)

    def require(self, shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        """Make sure, by the header alone, that the KV is of these layers.

        Nothing is read: of a forged file not even memory is taken.

        Args:
            shapes: `(kv_heads, head_dim)` of K and of V, by layer.

        Raises:
            ChunkFileError: it is of other layers.
        """
        if self.header.layers != len(shapes):
            raise self._error(f"holds {self.header.layers} layers, the model has {len(shapes)}")
        for index, (own, pair) in enumerate(zip(self._shapes, shapes, strict=True)):
            for which, stored, shape in zip("kv", own, pair, strict=True):
                if stored != shape:
                    name = f"{index:04d}.{which}"
                    raise self._error(f"holds {list(stored)} a token in {name}, not {list(shape)}")

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each `[tokens, kv_heads, head_dim]` on the CPU, checksums verified.

        All numbers are finite, and decoded. The tensors own their memory: they stay valid after `close`.

        Raises:
            ChunkFileError: as `encoded`.
        """
        return self.encoded(index).decode()

    def encoded(self, index: int) -> EncodedLayer:
        """A layer as it is stored, on the CPU, checksums verified; what it decodes to is finite.

        The tensors own their memory: they stay valid after `close`.

        Raises:
            ChunkFileError: the bytes are not those that were written, hold NaN or infinity, or there is
                no such layer.
        """
        if not 0 <= index < self.header.layers:
            raise self._error(f"has no layer {index}: it holds {self.header.layers}")
        names = layer_names(index, self.codec)
        return self._layer(index, {part: self._tensor(name) for part, name in names.items()})

    def verify(self) -> None:
        """As `TensorFile.verify`; and that what the layers decode to is finite."""
        super().verify()
        for index in range(self.header.layers if self.codec.bounded else 0):
            names = layer_names(index, self.codec)
            self._layer(index, {part: self._tensor(names[part]) for part in self.codec.bounded})

    @property
    def kv_bytes(self) -> int:
        """What all layers' K and V and the sensitivity take, for `layers_in`."""
        return list(self._entries.values())[-1].end - self._kv_begin

    @property
    def _kv_begin(self) -> int:
        return self._entries[next(iter(layer_names(0, self.codec).values()))].begin

    def layers_in(
        self, memory: Tensor, begin: int, end: int
    ) -> tuple[list[EncodedLayer], Tensor | None]:
        """As `encoded`, for layers `begin` to `end`: by one read, and in memory that is given.

        Args:
            memory: [kv_bytes], uint8, contiguous, on the CPU: the chunk's. Each layer has its own place
                in it. What is returned are views of it.

        Returns:
            Each layer; with the last one the sensitivity, as `sensitivity` gives it.

        Raises:
            ChunkFileError: as `encoded`.
        """
        names = [
            name for index in range(begin, end) for name in layer_names(index, self.codec).values()
        ]
        if end == self.header.layers and SENSITIVITY in self._entries:
            names.append(SENSITIVITY)
        origin = self._kv_begin
        place = slice(self._entries[names[0]].begin - origin, self._entries[names[-1]].end - origin)
        tensors = self._tensors_in(memory[place], names)
        parts = len(self.codec.names)
        layers = [
            self._layer(
                begin + place,
                dict(zip(self.codec.names, tensors[place * parts :], strict=False)),
            )
            for place in range(end - begin)
        ]
        return layers, tensors[-1] if len(tensors) % parts else None

    def _layer(self, index: int, parts: dict[str, Tensor]) -> EncodedLayer:
        dtype = dtype_of(self.header.dtype)
        if fault := self.codec.fault(parts, dtype):
            raise self._error(f"holds what cannot be decoded in layer {index}: {fault}")
        return EncodedLayer(self.codec, parts, dtype)

    def sensitivity(self) -> Tensor | None:
        """How much each token depends on what stands before it, `[layers, tokens]`, uint8.

        As `semkv_rag.blend.decoded` reads it; None where it was not measured, as in files of format 1.

        Raises:
            ChunkFileError: the bytes are not those that were written.
        """
        return self._tensor(SENSITIVITY) if SENSITIVITY in self._entries else None

    def _check_entries(
        self, metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        try:
            self.codec = codec_of(metadata)
            self._shapes = check_entries(metadata, entries)
        except ChunkFileError as error:
            raise self._unusable(str(error)) from error

    def _take_header(self, metadata: Mapping[str, str]) -> None:
        try:
            self.header = header_of(
                metadata, self._token_array("tokens"), self._token_array("context")
            )
        except ChunkFileError as error:
            raise self._unusable(str(error)) from error
        if self._model is not None and self.header.model != self._model:
            raise self._error(f"was written by another model ({self.header.model[:16]})")
        if self._chunk_id is not None and self.header.id != self._chunk_id:
            raise self._error(f"holds another chunk ({self.header.id[:16]})")

    def _token_array(self, name: str) -> TokenArray:
        return token_array(self._tensor(name).numpy())


def _tensors(
    header: ChunkHeader, layers: Sequence[tuple[Tensor, Tensor]], sensitivity: Tensor | None
) -> dict[str, Tensor]:
    """All tensors of a file by name, in file order, checked against the header."""
    if fault := fault_of(header):
        raise StoreError(f"chunk {header.id[:16]} cannot be stored: {fault}")
    if max(len(header.tokens), len(header.context)) > MAX_TOKENS:
        raise StoreError(f"chunk {header.id[:16]} is too long: it may have {MAX_TOKENS} tokens")
    if len(layers) != header.layers or not layers or not len(header.tokens):
        raise StoreError(f"chunk {header.id[:16]}: it has {len(layers)} layers of {header.layers}")
    tensors = {
        "tokens": torch.from_numpy(token_array(header.tokens).copy()),
        "context": torch.from_numpy(token_array(header.context).copy()),
    }
    codec = codec_named(header.codec)
    for index, pair in enumerate(layers):
        for which, tensor in zip("kv", pair, strict=True):
            name = f"{index:04d}.{which}"
            fits = tensor.ndim == 3 and tensor.shape[0] == len(header.tokens)
            fits = fits and tensor.dtype is not torch.int32  # tokens are that, and no KV is
            if not fits or dtype_name(tensor.dtype) != header.dtype:
                raise StoreError(
                    f"chunk {header.id[:16]}: {name} is {list(tensor.shape)} {tensor.dtype}, not"
                    f" [{len(header.tokens)}, kv_heads, head_dim] {header.dtype}"
                )
        keys, values = (tensor.detach().cpu().contiguous() for tensor in pair)
        for which, stored in (("k", keys), ("v", values)):
            if not is_finite(stored, raw_bytes(stored)):
                raise StoreError(
                    f"chunk {header.id[:16]}: {index:04d}.{which} holds NaN or infinity"
                )
        tensors |= _encoded(header, index, codec, keys, values)
    if sensitivity is not None:
        shape = [header.layers, len(header.tokens)]
        if sensitivity.dtype is not torch.uint8 or list(sensitivity.shape) != shape:
            raise StoreError(
                f"chunk {header.id[:16]}: its sensitivity is {list(sensitivity.shape)}"
                f" {sensitivity.dtype}, not {shape} uint8"
            )
        tensors[SENSITIVITY] = sensitivity.detach().cpu().contiguous()
    return tensors


def _encoded(
    header: ChunkHeader, index: int, codec: Codec, keys: Tensor, values: Tensor
) -> dict[str, Tensor]:
    """The tensors of a layer, by their names in a file."""
    shapes = [(int(tensor.shape[1]), int(tensor.shape[2])) for tensor in (keys, values)]
    try:
        codec.layout(len(header.tokens), shapes[0], shapes[1], keys.dtype)
    except ValueError as error:
        raise StoreError(
            f"chunk {header.id[:16]} cannot be stored as {codec.name}: {error}"
        ) from error
    parts = codec.encode(keys, values)
    names = layer_names(index, codec)
    return {name: parts[part].contiguous() for part, name in names.items()}
