"""Chunks in memory: the tier above the files.

A chunk's K and V of all layers, and its sensitivities, stand in one piece of the memory, as its file has
them. So the memory holds more chunks where a codec makes files smaller. The first reader that asks for a
chunk reads it from its file, a few layers at a time, and verifies them. So a reader that waits for the
first layer does not wait for the last. If both the thread that reads ahead and the one that loads a blend
want a chunk, they share the work.

The chunk that was used longest ago makes room. These do not:

* a chunk in use, whose views are being read;
* a chunk that a blend which was let in still waits for (`needed`);
* for reading ahead, a chunk that was read ahead and that no blend has used.

Where no room can be made, a chunk is read from its file. A chunk whose file is damaged, and one that was
left before all of it was read, do not stay.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from semkv_rag.connector.worker.arena import Arena
from semkv_rag.errors import ChunkFileError
from semkv_rag.store import ChunkFile
from semkv_rag.store.codecs import EncodedLayer

logger = logging.getLogger(__name__)

READ_BYTES = 2 << 20
"""Read and verified at a time, or one layer: what was read is still in the processor's cache then."""


class ChunkKey(NamedTuple):
    """A chunk: of a model, in a namespace, as a codec has it."""

    model: str
    namespace: str
    chunk_id: str
    codec: str


@dataclass(eq=False)
class KeptChunk:
    """A chunk in memory, or on its way there.

    Attributes:
        begin: of its piece of the arena.
        memory: [bytes], uint8: that piece.
        count: how many layers it has.
        file: open until all is read.
        layers: those that are read.
        sensitivity: [layers, tokens], uint8; None where there is none, or it is not read yet.
        users: how many read its views.
        ahead: whether it was read ahead, and no blend has used it.
        lost: whether its file is damaged.
    """

    key: ChunkKey
    begin: int
    memory: Tensor
    count: int
    file: ChunkFile | None
    layers: list[EncodedLayer] = field(default_factory=list)
    sensitivity: Tensor | None = None
    users: int = 0
    ahead: bool = False
    lost: bool = False
    reading: threading.Lock = field(default_factory=threading.Lock)

    def read_on(self, index: int) -> int:
        """Read until layer `index` is there, where nobody did; how many bytes were read here.

        Raises:
            ChunkFileError: its file is damaged.
        """
        read = 0
        while len(self.layers) <= index:
            with self.reading:
                if len(self.layers) <= index:
                    read += self._read_some()
        return read

    def _read_some(self) -> int:
        assert self.file is not None
        begin = len(self.layers)
        some = max(1, READ_BYTES * self.count // len(self.memory))
        end = min(begin + some, self.count)
        try:
            layers, sensitivity = self.file.layers_in(self.memory, begin, end)
        except ChunkFileError:
            self.lost = True
            raise
        if end == self.count:
            self.sensitivity = sensitivity
            self.file.close()
            self.file = None
        self.layers += layers
        codes = 0 if sensitivity is None else sensitivity.nbytes
        return codes + sum(layer.nbytes for layer in layers)


class HeldChunk:
    """A kept chunk in use, as a source of KV.

    Attributes:
        from_file_bytes: of it, that were read from the file through this.
    """

    def __init__(self, kept: KeptChunk) -> None:
        self._kept = kept
        self.from_file_bytes = 0

    @property
    def kv_bytes(self) -> int:
        """What its K and V and the sensitivity take."""
        return len(self._kept.memory)

    def encoded(self, index: int) -> EncodedLayer:
        """A layer, on the CPU: views, to be read while it is held.

        Raises:
            ChunkFileError: the file is damaged.
        """
        if len(self._kept.layers) <= index:
            read = self._kept.read_on(index)
            with self._kept.reading:  # several threads may read through this
                self.from_file_bytes += read
        return self._kept.layers[index]

    def sensitivity(self) -> Tensor | None:
        """[layers, tokens], uint8, or None: a view, as above.

        Raises:
            ChunkFileError: the file is damaged.
        """
        self.verify()
        return self._kept.sensitivity

    def verify(self) -> None:
        """Make sure of all of it: what is not read yet is read.

        Raises:
            ChunkFileError: the file is damaged.
        """
        self.encoded(self._kept.count - 1)


class ChunkMemory:
    """The chunks in memory; one per worker, safe for threads.

    Args:
        arena: where chunks stand.

    Attributes:
        needed: the chunks that blends which were let in wait for.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.RLock()
        self._chunks: OrderedDict[ChunkKey, KeptChunk] = OrderedDict()  # used longest ago first
        self.needed: Collection[ChunkKey] = frozenset()

    @property
    def used_bytes(self) -> int:
        """What its chunks take; at most the arena's size."""
        with self._lock:
            return self._arena.used_bytes

    @property
    def chunks(self) -> list[ChunkKey]:
        """Those in it, the one that was used longest ago first."""
        with self._lock:
            return list(self._chunks)

    @contextlib.contextmanager
    def holding(
        self, key: ChunkKey, open_file: Callable[[], ChunkFile], *, ahead: bool = False
    ) -> Iterator[HeldChunk | None]:
        """A chunk, for use inside the block; None where there is no room for it.

        Args:
            open_file: opens its file, whose layers are the model's.
            ahead: whether nobody waits for it yet.

        Raises:
            ChunkFileError: by `open_file`.
        """
        kept = self._find(key, ahead=ahead) or self._enter(key, open_file(), ahead=ahead)
        try:
            yield None if kept is None else HeldChunk(kept)
        finally:
            if kept is not None:
                self._release(kept)

    def _find(self, key: ChunkKey, *, ahead: bool) -> KeptChunk | None:
        with self._lock:
            kept = self._chunks.get(key)
            if kept is None or kept.lost:
                return None
            self._chunks.move_to_end(key)
            kept.users += 1
            kept.ahead &= ahead
            return kept

    def _enter(self, key: ChunkKey, file: ChunkFile, *, ahead: bool) -> KeptChunk | None:
        """Give a chunk its place, unless another thread was quicker; None where there is none."""
        with self._lock:
            kept = self._find(key, ahead=ahead)
            begin = self._make_room(file.kv_bytes, ahead=ahead) if kept is None else None
            if begin is not None:
                memory = self._arena.memory[begin : begin + file.kv_bytes]
                kept = KeptChunk(key, begin, memory, file.header.layers, file)
                kept.users, kept.ahead = 1, ahead
                self._chunks[key] = kept
                return kept
        file.close()
        return kept

    def _release(self, kept: KeptChunk) -> None:
        with self._lock:
            kept.users -= 1
            if not kept.users and kept.file is not None:
                self._drop(kept)

    def _make_room(self, size_bytes: int, *, ahead: bool) -> int | None:
        """Where a piece of this size begins, once enough chunks are gone; None: they may not go."""
        begin = self._arena.take(size_bytes)
        if begin is not None:
            return begin
        able = [
            kept
            for kept in self._chunks.values()
            if not (kept.users or kept.key in self.needed or (ahead and kept.ahead))
        ]
        pieces = [(kept.begin, len(kept.memory)) for kept in able]
        if not self._arena.would_fit(size_bytes, pieces):
            return None
        for kept in able:
            self._drop(kept)
            if (begin := self._arena.take(size_bytes)) is not None:
                break
        return begin

    def _drop(self, kept: KeptChunk) -> None:
        if kept.file is not None:
            kept.file.close()
        if self._chunks.get(kept.key) is kept:
            del self._chunks[kept.key]
        self._arena.give(kept.begin, len(kept.memory))


def made_chunk_memory(size_bytes: int, device: torch.device) -> ChunkMemory | None:
    """Memory for chunks; None where none is wanted or there is no room for it.

    Args:
        size_bytes: of all of it; 0 for none.
        device: the model's.
    """
    if not size_bytes:
        return None
    try:
        return ChunkMemory(Arena(size_bytes, pinned=device.type == "cuda"))
    except MemoryError as error:
        logger.warning("semkv: chunks are not kept in memory: %s", error)
        return None
