"""Vectors under ids, searched by inner product, with FAISS.

One per namespace and layer. Up to `GRAPH_FROM` vectors every one is compared; with more, an HNSW
graph is built beside the serving, in a thread of its own, and takes over once it is complete. Rows are
only ever appended: a removed or replaced vector's row is passed over, until a quarter of the rows are
such and the index is made anew. That keeps removal cheap and is all that HNSW can do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from semkv_rag.errors import MissingExtraError

if TYPE_CHECKING:
    import faiss

Vectors = NDArray[np.float32]

GRAPH_FROM = 30_000
"""Vectors up to which comparing all of 384 dimensions takes some ms on one core."""

_LINKS = 24  # HNSW's M: recall at a million vectors, for 200 bytes a vector
_BUILD_EFFORT = 80
_SEARCH_EFFORT = 384  # 99.7 % of the nearest among a million, in 1.1 ms; with 96 it is 86 %, in 0.5
_PIECE = 2_000  # rows that are added to a graph between two looks at whether it is still wanted
_FEW_DEAD = 64  # not worth making the index anew


def normalised(vectors: Vectors) -> Vectors:
    """`vectors`, [n, dim], each of length 1, in float32.

    Raises:
        ValueError: one is zero or not finite.
    """
    found = np.asarray(vectors, dtype=np.float32)
    if found.ndim != 2:
        raise ValueError(f"vectors must be [n, dim], not {list(found.shape)}")
    length = np.linalg.norm(found, axis=1, keepdims=True)
    if not np.isfinite(length).all() or not (length > 0).all():
        raise ValueError("a vector is zero or not finite")
    return np.ascontiguousarray(found / length)


@dataclass
class _Rows:
    """A FAISS index and whose rows are in it."""

    index: faiss.Index
    ids: list[str] = field(default_factory=list)
    row_of: dict[str, int] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        return len(self.ids) - len(self.row_of)

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        self.index.add(vectors)
        for id_ in ids:
            self.row_of[id_] = len(self.ids)
            self.ids.append(id_)

    def remove(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            self.row_of.pop(id_, None)

    def search(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        wanted = min(k, len(self.row_of))
        fetch = k
        while wanted:
            # Dead rows may take places: look further when they leave too few.
            similarities, rows = self.index.search(vector, min(fetch, len(self.ids)))
            found = [
                (self.ids[row], float(np.clip(similarity, -1, 1)))
                for similarity, row in zip(similarities[0], rows[0].tolist(), strict=True)
                if row >= 0 and self.row_of.get(self.ids[row]) == row
            ]
            if len(found) >= wanted or fetch >= len(self.ids):
                return found[:k]
            fetch *= 4
        return []

    def live(self, first: int = 0, count: int | None = None) -> tuple[list[str], Vectors]:
        """The rows that count, of all or of `count` rows from `first` on, copied."""
        last = len(self.ids) if count is None else min(first + count, len(self.ids))
        rows = [row for row in range(first, last) if self.row_of.get(self.ids[row]) == row]
        if not rows:
            return [], np.empty((0, self.index.d), np.float32)
        ids = [self.ids[row] for row in rows]
        return ids, self.index.reconstruct_batch(np.asarray(rows, np.int64))


class VectorIndex:
    """Vectors under ids; every method may be called from any thread.

    Args:
        dim: numbers of a vector.

    Attributes:
        dim: as given.

    Raises:
        MissingExtraError: FAISS is not installed.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._faiss = _import_faiss()
        self._lock = threading.Lock()
        self._rows = _Rows(self._faiss.IndexFlatIP(dim))
        self._builder: threading.Thread | None = None
        self._removed: set[str] = set()  # while a graph is built
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows.row_of)

    @property
    def is_graph(self) -> bool:
        """Whether an HNSW graph serves by now."""
        return isinstance(self._rows.index, self._faiss.IndexHNSWFlat)

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Add vectors, in place of those of the same ids.

        Args:
            ids: [n].
            vectors: [n, dim], of length 1.
        """
        if vectors.shape != (len(ids), self.dim):
            raise ValueError(f"{len(ids)} ids with vectors of {list(vectors.shape)}")
        with self._lock, _one_thread(self._faiss):
            self._rows.add(ids, np.ascontiguousarray(vectors, np.float32))
            self._changed()

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the vectors of those of `ids` that are there."""
        with self._lock:
            self._rows.remove(ids)
            if self._builder is not None:
                self._removed.update(ids)
            self._changed()

    def search(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """The `k` nearest, the most similar first, each with its inner product.

        Args:
            vector: [dim], of length 1.
        """
        if vector.shape != (self.dim,):
            raise ValueError(f"vectors have {self.dim} numbers, not {list(vector.shape)}")
        with self._lock, _one_thread(self._faiss):
            return self._rows.search(np.ascontiguousarray(vector[None], np.float32), k)

    def close(self) -> None:
        """Stop building."""
        with self._lock:
            self._closed = True
            builder = self._builder
        if builder is not None:
            builder.join()

    def _changed(self) -> None:
        """Make the index anew where that is due. The lock is held."""
        if self._builder is not None:
            return
        live, dead, graph = len(self._rows.row_of), self._rows.dead, self.is_graph
        due = dead > _FEW_DEAD and dead > live // 4
        if live > GRAPH_FROM and (due or not graph):
            self._builder = threading.Thread(target=self._build, name="semkv-vectors", daemon=True)
            self._builder.start()
        elif due or (graph and live < GRAPH_FROM // 2):
            rows = _Rows(self._faiss.IndexFlatIP(self.dim))
            rows.add(*self._rows.live())
            self._rows = rows

    def _build(self) -> None:
        """Make a graph of the rows that count, piece by piece; the lock is held only to copy one.

        Rows that come meanwhile are appended to the old index, and so are reached in their turn.
        """
        self._faiss.omp_set_num_threads(1)  # for this thread
        metric = self._faiss.METRIC_INNER_PRODUCT
        index: Any = self._faiss.IndexHNSWFlat(self.dim, _LINKS, metric)
        index.hnsw.efConstruction = _BUILD_EFFORT
        index.hnsw.efSearch = _SEARCH_EFFORT
        rows, done = _Rows(index), 0
        while not self._closed:
            with self._lock:
                if done == len(self._rows.ids):
                    rows.remove(id_ for id_ in self._removed if id_ not in self._rows.row_of)
                    self._rows, self._builder, self._removed = rows, None, set()
                    return
                ids, vectors = self._rows.live(done, _PIECE)
                done = min(done + _PIECE, len(self._rows.ids))
            if ids:
                rows.add(ids, vectors)


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """Let FAISS compute in the calling thread alone.

    Its further threads would wait for each other, spinning, on cores that are the model's: a search
    of 0.6 ms was seen to take 14. The setting is that of the thread, and of torch in it where both
    use the same OpenMP, so it is put back.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _import_faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise MissingExtraError("faiss-cpu", "prompt-cache") from error
    return faiss
