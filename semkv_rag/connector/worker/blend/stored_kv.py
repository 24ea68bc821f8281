"""Stored KV on its way into a request's blocks: a thread reads, verifies, moves and writes it.

The model runs meanwhile, for other requests or, one layer behind, for this one. Nobody else writes to the
request's blocks until it is blended, so the thread needs no lock for them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from semkv_rag.blend import decoded
from semkv_rag.connector.metrics import Fault
from semkv_rag.connector.worker.blend.layer_reader import LayerReader, LoadingThreads
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.model.device_stream import DeviceStream
from semkv_rag.connector.worker.model.slice import Watcher
from semkv_rag.connector.worker.model.sliced_model import SlicedModel
from semkv_rag.reuse import Span
from semkv_rag.store.codecs import EncodedLayer, Scratch


class KVSource(Protocol):
    """Where a chunk's KV comes from: a chunk file, or memory in the gate."""

    def encoded(self, index: int) -> EncodedLayer:
        """K and V of one layer, as they are stored.

        Raises:
            ChunkFileError: they cannot be read or are not what was written.
        """

    def sensitivity(self) -> Tensor | None:
        """How much each token depends on what stands before it, [layers, tokens], uint8, or None.

        Raises:
            ChunkFileError: as above.
        """


Sources: TypeAlias = AbstractContextManager[Mapping[str, KVSource]]
"""The sources of a task's chunks, by chunk id, while they are open."""


class LostKV(Exception):
    """A chunk's KV cannot be had; the message says why.

    Attributes:
        bad_chunks: the chunks whose files are the reason.
        fault: what went wrong; None where nothing did.
    """

    def __init__(
        self,
        message: str,
        bad_chunks: tuple[str, ...] = (),
        fault: Fault | None = "chunk",
    ) -> None:
        super().__init__(message)
        self.bad_chunks, self.fault = bad_chunks, fault


@dataclass(frozen=True)
class LostSources(AbstractContextManager[Mapping[str, KVSource]]):
    """Sources that cannot be had, which whoever opens them is told."""

    reason: str

    def __enter__(self) -> Mapping[str, KVSource]:
        raise LostKV(self.reason)

    def __exit__(self, *_: object) -> None: ...


class StoredKV:
    """Brings the stored KV of one blend into the cache, from now on.

    It writes whole spans, which is cheaper than to leave rows out: computed rows overwrite them later.

    Args:
        spans: those that are written, in prompt order.
        sources: opened and closed by the thread.
        threads: those that do the work.
        keeps_keys: whether `keys` is to have them.
        weighs: whether `sensitivity` is wanted.

    Attributes:
        sensitivity: of the candidates, [layers, candidates], on the CPU; None where no chunk has it
            stored. Known when the last layer is.
        took_ms: from the beginning to the last layer.
    """

    def __init__(
        self,
        model: SlicedModel,
        rows: BlendRows,
        spans: Sequence[Span],
        sources: Sources,
        threads: LoadingThreads,
        *,
        keeps_keys: bool = False,
        weighs: bool = False,
    ) -> None:
        self._model, self._rows, self._spans = model, rows, spans
        self._keeps_keys, self._weighs = keeps_keys, weighs
        self._keys: dict[int, Tensor] = {}
        self._scratch = Scratch()
        # In the keys' dtype; by rotary module, since layers share them.
        self._matrices: dict[int, Tensor] = {}
        self._changed = threading.Condition()
        self._written = 0  # layers
        self._fault: Exception | None = None
        self._stopped = False
        self._began = time.perf_counter()
        self.took_ms = 0.0
        self.sensitivity: Tensor | None = None
        self._layers = len(model.layers) if spans else 0
        # The blocks may have been another request's: what reads them still comes first.
        self._stream = DeviceStream(rows.positions.device)
        self._readers = threads.readers
        self._work = threads.loader.submit(self._bring, sources) if spans else None

    # ---- asked by the thread of the model --------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether all of it is in the cache, or never will be."""
        return self._written >= self._layers or self._fault is not None

    @property
    def fault(self) -> Exception | None:
        """Why it never will be."""
        return self._fault

    def check(self) -> None:
        """Make sure that all of it is in the cache, or still on its way there.

        Raises:
            LostKV: it cannot be had.
        """
        if self._fault is not None and self._written < self._layers:
            raise self._fault

    def settle(self) -> None:
        """Return when all of it is in the cache, or never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self.settled)

    def wait(self, index: int) -> None:
        """Return when layer `index` is in the cache.

        Raises:
            LostKV: it cannot be had.
        """
        needed = min(index + 1, self._layers)
        if self._written >= needed:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._written >= needed or self._fault is not None)
        if self._written < needed:
            assert self._fault is not None
            raise self._fault

    def wait_for_all(self) -> None:
        """Return when all of it is in the cache.

        Raises:
            LostKV: it cannot be had.
        """
        self.wait(self._layers - 1)

    def keys(self, index: int) -> Tensor | None:
        """The candidates' keys of a layer, moved, [candidates, kv_heads, head_dim], if they were kept.

        Asked for once.
        """
        return self._keys.pop(index, None)

    def stop(self) -> None:
        """End the work, wherever it is; returns when the thread is done with the blocks."""
        self._stopped = True
        if self._work is not None and not self._work.cancel():
            self._work.exception()
        self._keys.clear()

    # ---- the thread ------------------------------------------------------------------------

    @torch.inference_mode()
    def _bring(self, sources: Sources) -> None:
        try:
            with self._stream, sources as chunks, self._reader(chunks) as reader:
                of_spans = [self._rows.slots[:, self._rows.of_span(span)] for span in self._spans]
                slots = torch.cat(of_spans, dim=1)
                for index in range(self._layers):
                    if self._stopped:
                        return
                    self._bring_layer(index, reader, slots)
                    self._stream.finish()
                    last = index + 1 == self._layers
                    if last and self._weighs:
                        self.sensitivity = self._sensitivity(chunks)
                    if last:
                        self.took_ms = (time.perf_counter() - self._began) * 1000
                    with self._changed:
                        self._written = index + 1
                        self._changed.notify_all()
        except Exception as fault:
            with self._changed:
                self._fault = fault
                self._changed.notify_all()

    def _reader(self, chunks: Mapping[str, KVSource]) -> LayerReader:
        def read(index: int, span: Span) -> EncodedLayer:
            return self._stream.pinned(chunks[span.chunk_id].encoded(index))

        order = itertools.product(range(self._layers), self._spans)
        return LayerReader(read, order, self._readers)

    def _bring_layer(self, index: int, reader: LayerReader, slots: Tensor) -> None:
        """Write a layer: K and V go from where they were read to the cache.

        They are decoded where the model is: what is copied to a device is as small as what is stored.
        Where a kernel does all of it, for all spans at once, no keys are kept. Else it is done span by
        span.

        Args:
            slots: of the first span's tokens, then the next one's, [groups, tokens].
        """
        group = self._model.paged.group_of(self._model.layers[index].attention)
        rows = [slice(span.src, span.src + span.length) for span in self._spans]
        layers: Iterable[EncodedLayer] = (reader.take() for _ in self._spans)
        if (kernel := self._model.loading) is not None:
            layers = list(layers)
            if kernel.write(
                index,
                layers,
                rows,
                slots[group],
                matrices=self._matrices_of(index, layers[0].dtype),
                join=self._stream.join,
            ):
                return
        self._bring_spans(index, layers, rows, slots[group])

    def _bring_spans(
        self,
        index: int,
        layers: Iterable[EncodedLayer],
        rows: Sequence[slice],
        slots: Tensor,
    ) -> None:
        """Decode, move and write a layer's K and V of each span in turn.

        Args:
            layers: that layer of each span's chunk, one after the other.
            rows: which of the chunk's tokens.
            slots: of the first span's tokens, then the next one's, [tokens], int64.
        """
        kept: Tensor | None = None
        places_of_spans = torch.split(slots, [span.length for span in self._spans])
        of_spans = zip(self._spans, rows, places_of_spans, layers, strict=True)
        for number, (span, some, places, encoded) in enumerate(of_spans):
            if kept is None and self._keeps_keys:
                kept = self._room_for_keys(index, encoded.dtype)
            keys, values = encoded.decode(some, bring=self._stream.bring, scratch=self._scratch)
            into = None
            if kept is not None and not span.exact:
                into, kept = kept[: span.length], kept[span.length :]
            matrices = self._matrices_of(index, encoded.dtype)
            matrix = matrices[number] if matrices is not None and span.shift else None
            moved = self._moved(keys, matrix, into)
            if matrix is not None and self._model.layers[index].window is not None:
                # A key that overflows may stand outside of every later token's window. It would go unseen
                # and stay in the block for the next request: attention kernels read masked slots, too.
                most = torch.finfo(moved.dtype).max
                moved = moved.clamp_(-most, most)
            self._model.tap.write(index, moved, values, places)

    def _room_for_keys(self, index: int, dtype: torch.dtype) -> Tensor:
        """Where a layer's moved keys are kept, [candidates, kv_heads, head_dim]."""
        count = sum(span.length for span in self._spans if not span.exact)
        shape = self._model.layers[index].kv_shapes[0]
        kept = torch.empty(count, *shape, dtype=dtype, device=self._rows.slots.device)
        self._keys[index] = kept
        return kept

    def _matrices_of(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """What moves each span's keys of a layer, [spans, head_dim, head_dim]; None: all stay."""
        rotary = self._model.layers[index].rotary
        if rotary is None or not any(span.shift for span in self._spans):
            return None
        if id(rotary) not in self._matrices:
            size = self._model.layers[index].kv_shapes[0][1]
            matrices = [
                rotary.matrix(span.shift, size) if span.shift else torch.eye(size)
                for span in self._spans
            ]
            matrices = [one.cpu() for one in matrices]  # a module's own table may be on the device
            self._matrices[id(rotary)] = torch.stack(matrices).to(self._rows.slots.device, dtype)
        return self._matrices[id(rotary)]

    def _moved(self, keys: Tensor, matrix: Tensor | None, into: Tensor | None) -> Tensor:
        """Keys moved, in memory that is given, if it is."""
        if matrix is None:
            return keys if into is None else into.copy_(keys)
        size = keys.shape[-1]
        into = torch.empty_like(keys) if into is None else into
        torch.mm(keys.reshape(-1, size), matrix, out=into.view(-1, size))
        return into

    def _sensitivity(self, chunks: Mapping[str, KVSource]) -> Tensor | None:
        """What a chunk without would have is taken to be the mean of the others', layer by layer."""
        spans = [span for span in self._spans if not span.exact]
        parts = list[Tensor | None]()
        for span in spans:
            codes = chunks[span.chunk_id].sensitivity()
            rows = slice(span.src, span.src + span.length)
            fits = codes is not None and len(codes) == self._layers
            parts.append(decoded(codes[:, rows]) if codes is not None and fits else None)
        known = [part for part in parts if part is not None]
        if not known:
            return None
        mean = torch.cat(known, dim=1).mean(1, keepdim=True)
        filled = [
            mean.expand(self._layers, span.length) if part is None else part
            for span, part in zip(spans, parts, strict=True)
        ]
        return torch.cat(filled, dim=1)


class Loading(Watcher):
    """Holds a forward back, layer by layer, until what its attention reads is in the cache."""

    def __init__(self, stored: StoredKV) -> None:
        self._stored = stored

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        self._stored.wait(index)
