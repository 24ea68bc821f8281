"""Capture: keeping the KV of chunks while vLLM prefills them.

The scheduler side says, step by step, which slots of the paged cache belong to which chunk; the tap
sees the rows on their way to those slots and keeps them. Many chunks are captured in one batch, and a
chunk may be prefilled over several steps. When all of a chunk's rows are there, a background thread
writes its file, so that the next step does not wait for the disk; a prompt's, which nobody waits for, as
soon as the model pauses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from semkv_rag.engine.capture_memory import CaptureMemory
from semkv_rag.engine.lull import Lull
from semkv_rag.engine.model_view import Layer
from semkv_rag.engine.threads import pool_beside_model
from semkv_rag.errors import SemKVError
from semkv_rag.reuse import Span, token_array
from semkv_rag.store import ChunkFile, ChunkHeader, write_chunk
from semkv_rag.store.layout import chunk_path

logger = logging.getLogger(__name__)

WRITERS = 2


@dataclass(frozen=True)
class CaptureTask:
    """The part of one chunk that a step prefills.

    Attributes:
        ticket: the number by which the one who asked for the capture knows it.
        chunk_id, namespace, kind: the chunk's identity, as in its file's header.
        tokens: the prompt: the chunk's context, then the chunk.
        context: how many of them are the context, which is not stored.
        slots: [rows], int64: where the step's part of the chunk goes in the paged cache.
        start: the first prompt position of that part.
        head: exact spans of other chunks that the prompt starts with, one behind the other: what they
            cover is not computed, and is copied from their files. Only where there is no context.
    """

    request_id: str
    ticket: int
    chunk_id: str
    namespace: str
    kind: str
    tokens: list[int]
    context: int
    slots: np.ndarray[tuple[int], np.dtype[np.int64]]
    start: int
    head: tuple[Span, ...] = ()

    @property
    def head_tokens(self) -> int:
        return sum(span.length for span in self.head)


@dataclass
class _Buffer:
    """What was seen of one chunk so far.

    Attributes:
        layers: per layer the memory of its K and V, once the first of them were seen.
        rows: how many rows of it are filled.
    """

    task: CaptureTask
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: int = 0

    @property
    def wanted(self) -> int:
        return len(self.task.tokens) - self.task.context


@dataclass(frozen=True)
class Captured:
    """What became of one capture on one rank.

    Attributes:
        ticket: as in its task.
        bytes: its file's size; 0 when there is none.
        error: in words, why there is none.
        incomplete: part of it was found in vLLM's prefix cache, so its KV never passed the tap; the
            same capture with `skip_reading_prefix_cache` succeeds.
    """

    ticket: int
    bytes: int
    error: str | None = None
    incomplete: bool = False


@dataclass
class ChunkCapture:
    """One per worker. `begin_step`, the tap's calls and `end_step` are the worker's own thread."""

    root: Path
    layers: Sequence[Layer]
    rank: int
    world_size: int
    lull: Lull
    _buffers: dict[str, _Buffer] = field(default_factory=dict)
    _step: list[CaptureTask] = field(default_factory=list)
    _rows: list[tuple[_Buffer, slice, slice]] | None = None
    _memory: CaptureMemory = field(default_factory=CaptureMemory)
    _done: list[Captured] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _writers: ThreadPoolExecutor = field(
        default_factory=lambda: pool_beside_model(WRITERS, "semkv-write")
    )
    _prompt_writer: ThreadPoolExecutor = field(
        default_factory=lambda: pool_beside_model(1, "semkv-write-prompt")
    )
    model: str = ""

    def begin_step(self, tasks: Sequence[CaptureTask], model: str) -> None:
        """Called before each step that captures."""
        self.model = model
        self._step = list(tasks)
        self._rows = None
        for task in tasks:
            if (
                task.start <= task.context + task.head_tokens
            ):  # the chunk's first part (again, after a preemption)
                self._drop(task.request_id)
                self._buffers[task.request_id] = _Buffer(task)

    def see(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """The tap's handler while a step captures."""
        if self._rows is None:
            self._rows = self._find_rows(slots)
        heads = self.layers[index].kv_heads
        for buffer, rows, into in self._rows:
            k = keys[rows].reshape(into.stop - into.start, heads, -1)
            v = values[rows].reshape(into.stop - into.start, heads, -1)
            if index == len(buffer.layers):
                take = self._memory.take
                buffer.layers.append((take(buffer.wanted, k), take(buffer.wanted, v)))
            for kept, fresh in zip(buffer.layers[index], (k, v), strict=True):
                kept[into].copy_(fresh)

    def _find_rows(self, slots: Tensor) -> list[tuple[_Buffer, slice, slice]]:
        """Where in the batch each task's rows are, and where in its memory they go.

        A request's tokens stand side by side.
        """
        batch = slots.cpu().numpy()
        found = []
        for task in self._step:
            buffer = self._buffers.get(task.request_id)
            at = np.flatnonzero(batch == task.slots[0])
            if buffer is None or len(at) != 1:
                continue
            rows = slice(int(at[0]), int(at[0]) + len(task.slots))
            if np.array_equal(batch[rows], task.slots):
                first = task.start - task.context
                buffer.rows += len(task.slots)
                found.append((buffer, rows, slice(first, first + len(task.slots))))
        return found

    def end_step(self) -> None:
        """Called after each step that captures: hands finished chunks to the writers."""
        for task in self._step:
            if task.start + len(task.slots) < len(task.tokens):
                continue
            buffer = self._buffers.pop(task.request_id, None)
            wanted = len(task.tokens) - task.context - task.head_tokens
            missing = wanted - (buffer.rows if buffer else 0)
            if buffer is None or missing:
                error = f"{missing} of its tokens were not computed"
                self._add(Captured(task.ticket, 0, error, incomplete=True))
            elif task.kind == "prompt":
                size = sum(tensor.nbytes for pair in buffer.layers for tensor in pair)
                until = self.lull.hold(size)
                self._prompt_writer.submit(
                    self._write_in_lull, buffer, self.model, _all_copied(buffer), until, size
                )
            else:
                self._writers.submit(self._write, buffer, self.model, _all_copied(buffer))
        self._step = []

    def _write_in_lull(
        self,
        buffer: _Buffer,
        model: str,
        copied: torch.cuda.Event | None,
        until: float,
        size_bytes: int,
    ) -> None:
        self.lull.wait(until, size_bytes)
        self._write(buffer, model, copied)

    @torch.inference_mode()  # as the memory was made; PyTorch forbids writing to it outside
    def _write(self, buffer: _Buffer, model: str, copied: torch.cuda.Event | None) -> None:
        task, rows = buffer.task, buffer.wanted
        try:
            if copied is not None:
                copied.synchronize()
            self._copy_head(buffer, model)
            layers = [(keys[:rows].cpu(), values[:rows].cpu()) for keys, values in buffer.layers]
            header = ChunkHeader(
                id=task.chunk_id,
                model=model,
                namespace=task.namespace,
                kind=task.kind,
                tokens=token_array(task.tokens[task.context :]),
                context=token_array(task.tokens[: task.context]),
                dtype=str(layers[0][0].dtype).removeprefix("torch."),
                layers=len(layers),
                rank=self.rank,
                world_size=self.world_size,
            )
            path = chunk_path(self.root, model, task.namespace, task.chunk_id, self.rank)
            self._add(Captured(task.ticket, write_chunk(path, header, layers)))
        except (OSError, SemKVError) as error:
            self._add(Captured(task.ticket, 0, f"the chunk could not be written: {error}"))
        except Exception as error:  # whoever waits must be told
            logger.exception("A captured chunk could not be written")
            self._add(Captured(task.ticket, 0, f"the chunk could not be written: {error!r}"))
        finally:
            self._give_back(buffer)

    def _copy_head(self, buffer: _Buffer, model: str) -> None:
        task = buffer.task
        for span in task.head:
            path = chunk_path(self.root, model, task.namespace, span.chunk_id, self.rank)
            with ChunkFile(path, model=model, chunk_id=span.chunk_id) as stored:
                for index, kept in enumerate(buffer.layers):
                    for ours, theirs in zip(kept, stored.layer(index), strict=True):
                        ours[span.dst : span.end].copy_(theirs[span.src : span.src + span.length])

    def _add(self, captured: Captured) -> None:
        with self._lock:
            self._done.append(captured)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what was seen of requests that ended; most have been written by then."""
        for request_id in request_ids:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        if (buffer := self._buffers.pop(request_id, None)) is not None:
            self._give_back(buffer)

    def _give_back(self, buffer: _Buffer) -> None:
        self._memory.give(tensor for pair in buffer.layers for tensor in pair)

    def take(self) -> list[Captured]:
        """What became of the chunks since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Finish the files under way."""
        self._writers.shutdown(wait=True)
        self._prompt_writer.shutdown(wait=True)


def _all_copied(buffer: _Buffer) -> torch.cuda.Event | None:
    """What tells a writing thread, whose stream is another one, that a GPU has made the copies."""
    if not buffer.layers[0][0].is_cuda:
        return None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied
