"""The chunks of a blend's task: in memory, or opened as files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from semkv_rag.connector.messages import BlendStats, BlendTask, ReadAhead
from semkv_rag.connector.worker.blend.stored_kv import KVSource, LostKV
from semkv_rag.connector.worker.chunk_memory import ChunkKey, ChunkMemory, HeldChunk
from semkv_rag.errors import ChunkFileError, ObjectStoreError
from semkv_rag.store import ChunkFile
from semkv_rag.store.files.paths import chunk_path
from semkv_rag.store.files.store_files import LocalFiles
from semkv_rag.store.objects.landing import FileWait
from semkv_rag.store.objects.shared_files import SharedFiles


class OtherCodecError(Exception):
    """A file has another codec than the plan says: what the plan takes for exact may not be."""


@dataclass(frozen=True)
class Origin:
    """Where the chunks of a task came from, in bytes of their K, V and sensitivities.

    Attributes:
        memory_bytes: stood in memory, or were read ahead.
        file_bytes: were read from files of this machine.
        object_bytes: were fetched from the object store.
    """

    memory_bytes: int
    file_bytes: int
    object_bytes: int


@dataclass(frozen=True)
class ChunkFiles:
    """Those of one rank.

    Attributes:
        files: the store's.
        shapes: `(kv_heads, head_dim)` of K and of V, by layer.
        memory: where they are kept, if anywhere.
    """

    files: LocalFiles
    rank: int
    shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    memory: ChunkMemory | None = None
    _origins: dict[str, Origin] = field(default_factory=dict)

    def open_for(
        self, task: BlendTask
    ) -> contextlib.AbstractContextManager[Mapping[str, KVSource]]:
        """A task's chunks by id, open inside the block. What is not on this machine is fetched now.

        Raises:
            LostKV: files are missing, torn, another model's or did not come in time; or were found so
                inside the block.
        """
        return self._opened(task, self._expected(chunk_keys(task)))

    @contextlib.contextmanager
    def _opened(self, task: BlendTask, wait: FileWait | None) -> Iterator[Mapping[str, KVSource]]:
        sources: dict[str, ChunkFile | HeldChunk] = {}
        bad: list[str] = []
        error = ""
        with contextlib.ExitStack() as files:
            for key in chunk_keys(task):
                try:
                    sources[key.chunk_id] = self._source(key, files, wait)
                except ChunkFileError as fault:
                    bad.append(key.chunk_id)
                    error = str(fault)
                except (OtherCodecError, ObjectStoreError) as fault:
                    raise LostKV(str(fault)) from fault  # the chunk may be as good as ever
            if bad:
                raise LostKV(error, tuple(bad))
            try:
                yield sources
            except ChunkFileError as fault:
                raise LostKV(str(fault), _damaged(sources)) from fault
            except ObjectStoreError as fault:
                raise LostKV(str(fault)) from fault
            self._origins[task.request_id] = self._origin(task, sources, wait)

    def read_ahead(self, task: ReadAhead) -> None:
        """Read chunks into memory, as far as there is room; have those fetched that are not here."""
        keys = [ChunkKey(task.model, task.namespace, *chunk) for chunk in task.chunks]
        wait = self._expected(keys)
        if self.memory is None:
            return
        for key in keys:
            # What is wrong with a file is reported by the blend that wants it.
            with (
                contextlib.suppress(ChunkFileError, ObjectStoreError, OtherCodecError),
                self.memory.holding(key, partial(self._file, key, wait), ahead=True) as chunk,
            ):
                if chunk is None:
                    return
                chunk.sensitivity()

    def need(self, tasks: Iterable[BlendTask]) -> None:
        """Keep in memory what is there of the chunks of these tasks, and of no others."""
        if self.memory is not None:
            self.memory.needed = {key for task in tasks for key in chunk_keys(task)}

    def with_origin(self, request_id: str, stats: BlendStats) -> BlendStats:
        """These statistics of a blend, with where its chunks came from."""
        origin = self._origins.pop(request_id, None)
        if origin is None:
            return stats
        return replace(
            stats,
            memory_bytes=origin.memory_bytes,
            file_bytes=origin.file_bytes,
            object_bytes=origin.object_bytes,
        )

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody will ask where the chunks of these came from."""
        for request_id in request_ids:
            self._origins.pop(request_id, None)

    def _source(
        self, key: ChunkKey, files: contextlib.ExitStack, wait: FileWait | None
    ) -> ChunkFile | HeldChunk:
        if self.memory is not None:
            held = files.enter_context(self.memory.holding(key, partial(self._file, key, wait)))
            if held is not None:
                return held
        return files.enter_context(self._file(key, wait))

    def _origin(
        self, task: BlendTask, sources: Mapping[str, ChunkFile | HeldChunk], wait: FileWait | None
    ) -> Origin:
        memory = file = objects = 0
        for key in chunk_keys(task):
            source = sources[key.chunk_id]
            read = source.from_file_bytes if isinstance(source, HeldChunk) else source.kv_bytes
            memory += source.kv_bytes - read
            if wait is not None and self._path(key) in wait.landings:
                objects += read
            else:
                file += read
        return Origin(memory, file, objects)

    def _expected(self, keys: Sequence[ChunkKey]) -> FileWait | None:
        """The wait for files that are in an object store, which are fetched from now on."""
        if not isinstance(self.files, SharedFiles):
            return None
        wait = self.files.wait()
        there = set() if self.memory is None else set(self.memory.chunks)
        self.files.expect([self._path(key) for key in keys if key not in there], wait)
        return wait

    def _path(self, key: ChunkKey) -> Path:
        return chunk_path(self.files.root, key.model, key.namespace, key.chunk_id, self.rank)

    def _file(self, key: ChunkKey, wait: FileWait | None) -> ChunkFile:
        path = self._path(key)
        if isinstance(self.files, SharedFiles):
            file = self.files.chunk(path, model=key.model, chunk_id=key.chunk_id, wait=wait)
            if file.codec.name != key.codec and self.files.forget(path):
                file.close()  # it was recoded since it was copied
                file = self.files.chunk(path, model=key.model, chunk_id=key.chunk_id, wait=wait)
        else:
            file = ChunkFile(path, model=key.model, chunk_id=key.chunk_id)
        try:
            file.require(self.shapes)
            if file.codec.name != key.codec:
                raise OtherCodecError(
                    f"chunk {key.chunk_id[:16]} was recoded from {key.codec} to {file.codec.name}"
                    " when it was wanted"
                )
        except BaseException:
            file.close()
            raise
        return file


def chunk_keys(task: BlendTask) -> list[ChunkKey]:
    """The chunks that a task may load, each once; what is before its start is in the cache."""
    namespace = task.plan.options.namespace
    chunks = dict.fromkeys(
        (span.chunk_id, span.codec) for span in task.plan.spans if span.end > task.start
    )
    return [ChunkKey(task.model, namespace, *chunk) for chunk in chunks]


def _damaged(sources: Mapping[str, ChunkFile | HeldChunk]) -> tuple[str, ...]:
    """The chunks whose files do not check out."""
    damaged = []
    for chunk_id, source in sources.items():
        try:
            source.verify()
        except ChunkFileError:
            damaged.append(chunk_id)
        except ObjectStoreError:  # nobody knows
            continue
    return tuple(damaged)
