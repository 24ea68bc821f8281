"""Ways to bring stored chunks to where a blend wants them, timed in a worker."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.messages import BlendTask, ReadAhead
from semkv_rag.connector.threads import pool_behind_model
from semkv_rag.connector.worker.arena import Arena
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.stored_kv import StoredKV
from semkv_rag.connector.worker.chunk_files import ChunkFiles
from semkv_rag.connector.worker.chunk_memory import ChunkMemory
from semkv_rag.reuse import ReusePlan, Span
from semkv_rag.store import ChunkFile
from semkv_rag.store.codecs import PLAIN


@dataclass(frozen=True)
class Chunks:
    """Chunks of one length.

    Attributes:
        ids: of each.
        paths: the file of each.
    """

    model: str
    namespace: str
    ids: Sequence[str]
    paths: Sequence[Path]
    tokens: int


class Loading:
    """In the worker's process; `executor` is the connector's."""

    def __init__(self, executor: Any, chunks: Chunks) -> None:
        self._chunks = chunks
        self._setting = executor._blend_pass.setting
        files: ChunkFiles = executor._files
        with ChunkFile(chunks.paths[0], model=chunks.model) as file:
            size, self._layers = file.kv_bytes, file.header.layers
        self.kv_bytes = size * len(chunks.ids)
        self._arena = Arena(self.kv_bytes + (1 << 20), pinned=False)
        self._memory = ChunkMemory(self._arena)
        self._files = ChunkFiles(files.files, files.rank, files.shapes)
        self._kept = ChunkFiles(files.files, files.rank, files.shapes, self._memory)
        self._ahead = pool_behind_model(1, "ahead")
        self._source = torch.ones(self.kv_bytes, dtype=torch.uint8)
        self._target = torch.ones(self.kv_bytes, dtype=torch.uint8)
        self._block = executor._config.cache_config.block_size
        (self._slots,) = BlendRows.of(self._task(moved=True), self._setting.model).slots
        dtype = self._setting.model.layers[0].attention.kv_cache.dtype
        # Each layer's from memory of its own, as a blend has them: what was just read is in a cache.
        self._there = random_kv(files.shapes, len(self._slots), dtype)

    # ---- ways ------------------------------------------------------------------------------

    def memcpy(self) -> None:
        """The same bytes from memory to memory, a chunk at a time."""
        size = self.kv_bytes // len(self._chunks.ids)
        for begin in range(0, self.kv_bytes, size):
            self._target[begin : begin + size].copy_(self._source[begin : begin + size])

    def memcpy_in_pieces(self) -> None:
        """The same; K and V of each layer by themselves."""
        size = self.kv_bytes // (len(self._chunks.ids) * self._layers * 2)
        for begin in range(0, self.kv_bytes - size + 1, size):
            self._target[begin : begin + size].copy_(self._source[begin : begin + size])

    def kernel(self) -> None:
        """As many K and V, which are there, written to the paged cache by vLLM's own kernel alone."""
        for index, (keys, values) in enumerate(self._there):
            self._setting.model.tap.write(index, keys, values, self._slots)

    def copied(self, files: ChunkFiles) -> None:
        """All layers of all chunks, verified, in memory of whoever asked."""
        begin = 0
        with files.open_for(self._task(moved=True)) as sources:
            for source in sources.values():
                for index in range(self._layers):
                    for tensor in source.encoded(index).decode():
                        content = tensor.view(torch.uint8).flatten()
                        self._target[begin : begin + len(content)].copy_(content)
                        begin += len(content)

    def read(self, files: ChunkFiles) -> None:
        """All layers of all chunks, verified: layer by layer, as a blend asks for them."""
        with files.open_for(self._task(moved=True)) as sources:
            for index in range(self._layers):
                for source in sources.values():
                    source.encoded(index)

    def plain_read(self) -> None:
        """The files, one behind the other, each by one read into memory that is there."""
        buffer = memoryview(self._target.numpy())
        for path in self._chunks.paths:
            file = os.open(path, os.O_RDONLY)
            size, done = os.fstat(file).st_size, 0
            while done < size:
                part = buffer[: min(size - done, len(buffer))]
                done += os.preadv(file, [part], done)
            os.close(file)

    def to_cache(self, files: ChunkFiles, *, moved: bool) -> None:
        """All of it written to the paged cache, as a blend does it."""
        task, setting = self._task(moved=moved), self._setting
        rows = BlendRows.of(task, setting.model)
        sources = files.open_for(task)
        stored = StoredKV(setting.model, rows, rows.spans, sources, setting.loading)
        stored.wait_for_all()
        stored.stop()

    def to_cache_ahead(self) -> None:
        """The same, while another thread reads ahead into the tier."""
        chunks = self._chunks
        ids = tuple((id_, PLAIN) for id_ in chunks.ids)
        ahead = ReadAhead("loading", chunks.model, chunks.namespace, ids)
        reading = self._ahead.submit(self._kept.read_ahead, ahead)
        self.to_cache(self._kept, moved=True)
        reading.result()

    # ---- measured --------------------------------------------------------------------------

    def warm(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each way, round by round; files are in the page cache."""
        ways: dict[str, Callable[[], None]] = {
            "memcpy": self._beside(self.memcpy),
            "memcpy in pieces": self._beside(self.memcpy_in_pieces),
            "ram, copied": self._beside(lambda: self.copied(self._kept)),
            "files, copied": self._beside(lambda: self.copied(self._files)),
            "kernel": self._beside(self.kernel),
            "ram to cache": lambda: self.to_cache(self._kept, moved=False),
            "files to cache": lambda: self.to_cache(self._files, moved=False),
            "ram to cache, moved": lambda: self.to_cache(self._kept, moved=True),
            "files to cache, moved": lambda: self.to_cache(self._files, moved=True),
        }
        for way in ways.values():
            way()
        assert len(self._memory.chunks) == len(self._chunks.ids)
        return _timed(ways, rounds)

    def cold(self, rounds: int) -> dict[str, list[float]]:
        """The same; before each, the files are in no page cache of this machine, nor in the tier."""
        ways: dict[str, Callable[[], None]] = {
            "plain read": self._beside(self.plain_read),
            "into ram": self._beside(lambda: self.read(self._kept)),
            "files": self._beside(lambda: self.read(self._files)),
            "into ram, to cache, moved": lambda: self.to_cache(self._kept, moved=True),
            "ahead, to cache, moved": self.to_cache_ahead,
            "files to cache, moved": lambda: self.to_cache(self._files, moved=True),
        }
        return _timed(ways, rounds, self._drop)

    def _beside(self, way: Callable[[], None]) -> Callable[[], None]:
        """A way, in the thread that loads blends."""
        return lambda: self._setting.loading.submit(torch.inference_mode()(way)).result()

    def _drop(self) -> None:
        with self._memory._lock:
            for kept in list(self._memory._chunks.values()):
                self._memory._drop(kept)
        for path in self._chunks.paths:
            drop_from_page_cache(path)

    def _task(self, *, moved: bool) -> BlendTask:
        count, length = len(self._chunks.ids), self._chunks.tokens
        places = [self._block + index * length for index in range(count)]
        spans = tuple(
            Span(chunk_id, 0, place, length, base=0 if moved else place)
            for chunk_id, place in zip(self._chunks.ids, places, strict=True)
        )
        covered = spans[-1].end
        options = ReuseOptions(namespace=self._chunks.namespace, ratio=0.0)
        blocks = list(range(1, 2 - (-covered // self._block)))
        plan, tokens = ReusePlan(spans, covered, options), [8] * covered
        return BlendTask("loading", plan, tokens, (blocks,), 0, self._chunks.model)


def _timed(
    ways: dict[str, Callable[[], None]], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            before()
            began = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - began)
    return took


def drop_from_page_cache(path: Path) -> None:
    """Have the system forget a file's content, and make sure of it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert resident_share(file) == 0
    finally:
        os.close(file)


def resident_share(file: int) -> float:
    """How much of an open file is in the page cache, 0 to 1."""
    size = os.fstat(file).st_size
    with mmap.mmap(file, size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        place = np.frombuffer(mapped, dtype=np.uint8)
        fault = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(place.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(pages.ctypes.data),
        )
        del place
    assert fault == 0, os.strerror(ctypes.get_errno())
    return float((pages & 1).mean())


def random_kv(
    shapes: Iterable[tuple[tuple[int, int], tuple[int, int]]], tokens: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """K and V of layers, each [tokens, kv_heads, head_dim].

    Args:
        shapes: `(kv_heads, head_dim)` of K and of V, by layer.
    """
    return [
        (torch.randn(tokens, *keys).to(dtype), torch.randn(tokens, *values).to(dtype))
        for keys, values in shapes
    ]
