"""Capture: keeping the KV of chunks that vLLM has prefilled.

The scheduler side says which step computes the last of a chunk's tokens, and which blocks of the paged
cache hold the chunk then. The worker copies these blocks behind that step's forward. It does not matter
what filled them: this forward, an earlier one, a blend, or another request whose blocks vLLM shares.

A background thread unpacks the copies and writes the chunk's file, so that the next step does not wait
for the disk. Nobody waits for the file of a whole prompt, so it is written when the model pauses
(`lull`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from semkv_rag.blend import encoded, sensitivity_of
from semkv_rag.connector.capture_results import CaptureTeller
from semkv_rag.connector.messages import NULL_BLOCK, Captured, CaptureTask
from semkv_rag.connector.threads import pool_behind_model, pool_beside_model
from semkv_rag.connector.worker.capture.capture_memory import CaptureMemory
from semkv_rag.connector.worker.capture.lull import Lull
from semkv_rag.connector.worker.model.adapters import Adapters
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.errors import SemKVError
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkHeader, write_chunk
from semkv_rag.store.codecs import PLAIN
from semkv_rag.store.files.paths import chunk_path
from semkv_rag.store.files.store_files import LocalFiles

logger = logging.getLogger(__name__)

WRITERS = 2

PATIENCE_S = 30.0
"""How long a chunk's capture waits for memory that others under way have; the model waits with it."""

MOST_REFERENCES = 64
"""V of so many references are kept at most; the request that would compare the oldest may be gone."""


@dataclass
class _Copy:
    """A chunk's blocks out of the paged cache.

    Attributes:
        parts: in the order of the layers; each those that are unpacked in one go, and their blocks,
            see `PagedKV.copy_blocks`.
        made: what tells a writing thread, whose stream is another one, that a GPU has made them.
    """

    task: CaptureTask
    parts: list[tuple[list[BlockLayout], Tensor]]
    made: torch.cuda.Event | None = None

    @property
    def size_bytes(self) -> int:
        return sum(blocks.nbytes for _, blocks in self.parts)


@dataclass
class ChunkCapture:
    """Copies KV out of the paged cache and has it written; one per worker.

    Attributes:
        files: the store's.
        layouts: those of each layer's blocks.
        teller: reports what became of captures.
        codec: by which chunks are written.
        adapters: None where the engine serves none.
    """

    files: LocalFiles
    paged: PagedKV
    layouts: Sequence[BlockLayout]
    rank: int
    world_size: int
    lull: Lull
    teller: CaptureTeller
    codec: str = PLAIN
    adapters: Adapters | None = None
    _memory: CaptureMemory = field(default_factory=CaptureMemory)
    _done: list[Captured] = field(default_factory=list)
    _references: OrderedDict[int, Future[list[Tensor]]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)
    _writers: ThreadPoolExecutor = field(
        default_factory=lambda: pool_beside_model(WRITERS, "semkv-write")
    )
    _prompt_writer: ThreadPoolExecutor = field(
        default_factory=lambda: pool_behind_model(1, "semkv-write-prompt")
    )

    def keep(self, tasks: Sequence[CaptureTask], failed_blocks: set[int]) -> None:
        """Called behind each step that completes chunks, in the model's own thread.

        Args:
            failed_blocks: blocks that hold nothing of use.
        """
        for task in tasks:
            if task.adapter is not None and not (
                self.adapters is not None and self.adapters.holds(task.adapter)
            ):
                self.refuse([task], "the LoRA adapter was loaded with other weights")
                continue
            if failed_blocks.intersection(chain(*task.block_ids)):
                if task.role == "reference":  # the chunk is then stored without a comparison
                    continue
                self._add(Captured(task.ticket, 0, "its tokens are computed once more"))
                continue
            if any(NULL_BLOCK in group for group in task.block_ids):
                self.refuse(
                    [task],
                    "a window has left its first tokens behind, and vLLM has given up their blocks",
                )
                continue
            # Whoever precomputes waits for its chunks anyway; nobody waits for a prompt.
            if not self._memory.has_room(0.0 if task.kind == "prompt" else PATIENCE_S):
                self.refuse([task], "the captures under way take all memory that they may")
                continue
            try:
                copy = self._copy(task)
            except Exception as error:  # no memory, say: the request is answered all the same
                logger.exception("A chunk's KV could not be copied")
                if task.role == "reference":
                    continue
                self._add(Captured(task.ticket, 0, f"its KV could not be copied: {error!r}"))
                continue
            if task.role == "reference":
                self._references[task.ticket] = self._writers.submit(self._values, copy)
                while len(self._references) > MOST_REFERENCES:
                    self._references.popitem(last=False)
            elif task.kind == "prompt":
                until = self.lull.hold(copy.size_bytes)
                self._prompt_writer.submit(self._write_in_lull, copy, until)
            else:
                reference = self._references.pop(task.ticket, None)
                self._writers.submit(self._write, copy, reference)

    def refuse(self, tasks: Sequence[CaptureTask], reason: str) -> None:
        """Keep nothing of them."""
        for task in tasks:
            if task.role != "reference":
                self._add(Captured(task.ticket, 0, reason))

    def _copy(self, task: CaptureTask) -> _Copy:
        blocks = torch.tensor(task.block_ids, device=self.paged.device)
        copy = _Copy(task, [])
        for (_, group), alike in groupby(self.layouts, self._read_together):
            layers = list(alike)
            caches = [layout.attention.kv_cache for layout in layers]
            try:
                packed = self.paged.copy_blocks(caches, blocks[group], self._memory.take)
            except BaseException:
                self._give_back(copy)
                raise
            copy.parts.append((layers, packed))
        if blocks.is_cuda:
            copy.made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copy.made.record()
        return copy

    def _read_together(self, layout: BlockLayout) -> tuple[tuple[object, ...], int]:
        """Equal for layers that are read in one go; the group of their blocks with it."""
        return layout.reading, self.paged.group_of(layout.attention)

    def _give_back(self, copy: _Copy) -> None:
        """Give back what is left of a copy's memory."""
        while copy.parts:
            self._memory.give(copy.parts.pop()[1])

    def _write_in_lull(self, copy: _Copy, until: float) -> None:
        self.lull.wait(until, copy.size_bytes)
        self._write(copy)

    @torch.inference_mode()
    def _values(self, copy: _Copy) -> list[Tensor]:
        """V by layer, each [tokens, kv_heads, head_dim]."""
        if copy.made is not None:
            copy.made.synchronize()
        try:
            return [values.clone() for _, values in self._unpacked(copy)]
        finally:
            self._give_back(copy)

    @torch.inference_mode()  # as the copies were made; PyTorch forbids writing to them outside
    def _write(self, copy: _Copy, reference: Future[list[Tensor]] | None = None) -> None:
        task = copy.task
        try:
            if copy.made is not None:
                copy.made.synchronize()
            layers = list(self._unpacked(copy))
            header = ChunkHeader(
                id=task.chunk_id,
                model=task.model,
                namespace=task.namespace,
                kind=task.kind,
                tokens=token_array(task.tokens[task.context :]),
                context=token_array(task.tokens[: task.context]),
                dtype=str(layers[0][0].dtype).removeprefix("torch."),
                layers=len(layers),
                rank=self.rank,
                world_size=self.world_size,
                codec=self.codec,
            )
            root = self.files.root
            path = chunk_path(root, task.model, task.namespace, task.chunk_id, self.rank)
            sensitive = None if reference is None else _compared(layers, reference)

            def write_to(place: Path) -> int:
                return write_chunk(place, header, layers, sensitive)

            self._add(Captured(task.ticket, self.files.write(path, write_to)))
        except (OSError, SemKVError) as error:
            self._add(Captured(task.ticket, 0, f"the chunk could not be written: {error}"))
        except Exception as error:  # whoever waits must be told
            logger.exception("A captured chunk could not be written")
            self._add(Captured(task.ticket, 0, f"the chunk could not be written: {error!r}"))
        finally:
            self._give_back(copy)

    def _unpacked(self, copy: _Copy) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of the chunk's tokens, layer by layer; each copy's memory is given back."""
        first = copy.task.context % self.paged.block_size
        rows = slice(first, first + len(copy.task.tokens) - copy.task.context)
        while copy.parts:
            layers, packed = copy.parts[0]
            # In few calls, since each takes Python's lock from the model's thread for a moment.
            both = layers[0].unpack(self.paged.codes(layers[0].attention.kv_cache, packed))
            self._memory.give(copy.parts.pop(0)[1])
            keys, values = (part.view(len(layers), -1, *part.shape[1:])[:, rows] for part in both)
            yield from zip(keys, values, strict=True)

    def _add(self, captured: Captured) -> None:
        if not self.teller.tell(captured):
            with self._lock:
                self._done.append(captured)

    def take(self) -> list[Captured]:
        """What became of the chunks since the last call, and could not be told."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Finish the files under way."""
        self._writers.shutdown(wait=True)
        self._prompt_writer.shutdown(wait=True)
        self.teller.close()


def _compared(
    layers: Sequence[tuple[Tensor, Tensor]], reference: Future[list[Tensor]]
) -> Tensor | None:
    """How far the V are from a reference's, [layers, tokens], as bytes; None where that failed."""
    try:
        others = reference.result()
        pairs = zip(layers, others, strict=True)
        return encoded(torch.stack([sensitivity_of(v, other) for (_, v), other in pairs]))
    except Exception:  # the chunk is as good without
        logger.exception("A chunk's V could not be compared with those behind the prompt prefix")
        return None
