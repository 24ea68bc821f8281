"""Chunk files, opened for a blend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.blend.stored_kv import LostKV
from semkv_rag.errors import ChunkFileError
from semkv_rag.store import ChunkFile
from semkv_rag.store.files.paths import chunk_path


@dataclass(frozen=True)
class ChunkFiles:
    """Those of one rank.

    Attributes:
        root: the store's folder.
        shapes: `(kv_heads, head_dim)` of K and of V, by layer.
    """

    root: Path
    rank: int
    shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]]

    @contextlib.contextmanager
    def open_for(self, task: BlendTask, model: str) -> Iterator[Mapping[str, ChunkFile]]:
        """A task's files by chunk id, open inside the block.

        Raises:
            LostKV: files are missing, torn, or another model's; or were found so inside the block.
        """
        sources: dict[str, ChunkFile] = {}
        bad: list[str] = []
        error = ""
        namespace = task.plan.options.namespace
        with contextlib.ExitStack() as files:
            for chunk_id in dict.fromkeys(span.chunk_id for span in task.plan.spans):
                path = chunk_path(self.root, model, namespace, chunk_id, self.rank)
                try:
                    file = files.enter_context(ChunkFile(path, model=model, chunk_id=chunk_id))
                    file.require(self.shapes)
                    sources[chunk_id] = file
                except ChunkFileError as fault:
                    bad.append(chunk_id)
                    error = str(fault)
            if bad:
                raise LostKV(error, tuple(bad))
            try:
                yield sources
            except ChunkFileError as fault:
                raise LostKV(str(fault), _damaged(sources)) from fault


def _damaged(sources: Mapping[str, ChunkFile]) -> tuple[str, ...]:
    """The chunks whose files do not check out."""
    damaged = []
    for chunk_id, file in sources.items():
        try:
            file.verify()
        except ChunkFileError:
            damaged.append(chunk_id)
    return tuple(damaged)
