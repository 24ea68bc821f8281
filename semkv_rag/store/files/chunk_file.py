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
from semkv_rag.store.files.finite import is_finite, raw_bytes
from semkv_rag.store.files.header import (
    FORMAT,
    MAX_TOKENS,
    SENSITIVITY,
    ChunkHeader,
    check_entries,
    fault_of,
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
        layers: K and V of every layer, each `[tokens, kv_heads, head_dim]`.
        sensitivity: `[layers, tokens]`, uint8, as `semkv_rag.blend.encoded` makes them, or None.

    Raises:
        StoreError: header and tensors do not fit each other, or a tensor holds NaN or infinity.
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    return write_tensors(
        Path(path), FORMAT, metadata_of(header), _tensors(header, layers, sensitivity)
    )


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
        path: the file.
        size_bytes: its size.

    Raises:
        ChunkFileError: it is missing, torn, altered, or another model's or chunk's.
        StoreVersionError: a newer version wrote it.
    """

    FORMAT = FORMAT

    header: ChunkHeader

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
        for index, pair in enumerate(shapes):
            for name, shape in zip(layer_names(index), pair, strict=True):
                if (stored := self._entries[name].shape[1:]) != shape:
                    raise self._error(f"holds {list(stored)} a token in {name}, not {list(shape)}")

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each `[tokens, kv_heads, head_dim]` on the CPU, checksums verified.

        All numbers are finite. The tensors own their memory: they stay valid after `close`.

        Raises:
            ChunkFileError: the bytes are not those that were written, hold NaN or infinity, or there is
                no such layer.
        """
        if not 0 <= index < self.header.layers:
            raise self._error(f"has no layer {index}: it holds {self.header.layers}")
        key, value = layer_names(index)
        return self._tensor(key), self._tensor(value)

    @property
    def kv_bytes(self) -> int:
        """What all layers' K and V and the sensitivity take, for `layers_in`."""
        return list(self._entries.values())[-1].end - self._entries[layer_names(0)[0]].begin

    def layers_in(
        self, memory: Tensor, begin: int, end: int
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """As `layer`, for layers `begin` to `end`: by one read, and in memory that is given.

        Args:
            memory: [kv_bytes], uint8, contiguous, on the CPU: the chunk's. Each layer has its own place
                in it. What is returned are views of it.

        Returns:
            K and V of each layer; with the last layer the sensitivity, as `sensitivity` gives it.

        Raises:
            ChunkFileError: as `layer`.
        """
        names = [name for index in range(begin, end) for name in layer_names(index)]
        if end == self.header.layers and SENSITIVITY in self._entries:
            names.append(SENSITIVITY)
        origin = self._entries[layer_names(0)[0]].begin
        place = slice(self._entries[names[0]].begin - origin, self._entries[names[-1]].end - origin)
        tensors = self._tensors_in(memory[place], names)
        pairs = list(zip(tensors[0::2], tensors[1::2], strict=False))
        return pairs, tensors[-1] if len(tensors) % 2 else None

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
            check_entries(metadata, entries)
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
    for index, pair in enumerate(layers):
        for name, tensor in zip(layer_names(index), pair, strict=True):
            fits = tensor.ndim == 3 and tensor.shape[0] == len(header.tokens)
            fits = fits and tensor.dtype is not torch.int32  # tokens are that, and no KV is
            if not fits or dtype_name(tensor.dtype) != header.dtype:
                raise StoreError(
                    f"chunk {header.id[:16]}: {name} is {list(tensor.shape)} {tensor.dtype}, not"
                    f" [{len(header.tokens)}, kv_heads, head_dim] {header.dtype}"
                )
            tensors[name] = stored = tensor.detach().cpu().contiguous()
            if not is_finite(stored, raw_bytes(stored)):
                raise StoreError(f"chunk {header.id[:16]}: {name} holds NaN or infinity")
    if sensitivity is not None:
        shape = [header.layers, len(header.tokens)]
        if sensitivity.dtype is not torch.uint8 or list(sensitivity.shape) != shape:
            raise StoreError(
                f"chunk {header.id[:16]}: its sensitivity is {list(sensitivity.shape)}"
                f" {sensitivity.dtype}, not {shape} uint8"
            )
        tensors[SENSITIVITY] = sensitivity.detach().cpu().contiguous()
    return tensors
