"""Finds stored chunks in a prompt, on tokens.

One `ChunkIndex` per model and namespace lives in the scheduler process. `match` is called once per
request, `add` and `remove` whenever the store's change feed brings something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from semkv_rag.reuse.overlap import resolve
from semkv_rag.reuse.plan import Span
from semkv_rag.reuse.tokens import StoredTokens, TokenArray


class ChunkIndex:
    """The chunks of one model and namespace, found in a prompt at any offset.

    Args:
        tokens_of: gives the stored tokens of chunks, by id; ids it does not know are left out.
        window: tokens of an indexed window. A common run of `window + window // 2` tokens is found.
    """

    def __init__(
        self,
        tokens_of: Callable[[Sequence[str]], Mapping[str, StoredTokens]],
        *,
        window: int = 8,
    ) -> None:
        self._tokens_of = tokens_of
        self._window = window
        self._stride = window // 2 + 1
        self._shortest = window + self._stride - 1
        self._windows: dict[bytes, list[tuple[str, int]]] = {}
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory the index takes."""
        return sum(len(key) + 64 * len(value) for key, value in self._windows.items())

    def add(self, chunks: Iterable[tuple[str, TokenArray]]) -> None:
        """Index chunks; ids that are indexed already are passed over."""
        for chunk_id, tokens in chunks:
            if chunk_id in self._ids:
                continue
            self._ids[chunk_id] = len(tokens)
            array = np.asarray(tokens, dtype=np.int64)
            for start in range(0, len(array) - self._window + 1, self._stride):
                key = array[start : start + self._window].tobytes()
                self._windows.setdefault(key, []).append((chunk_id, start))

    def remove(self, ids: Iterable[str]) -> None:
        """Never return these chunks again; unknown ids are passed over."""
        for chunk_id in ids:
            self._ids.pop(chunk_id, None)

    def match(self, prompt: TokenArray) -> list[Span]:
        """The stored chunks in `prompt`: spans in prompt order that do not overlap."""
        array = np.asarray(prompt, dtype=np.int64)
        diagonals: dict[tuple[str, int], None] = {}
        for at in range(len(array) - self._window + 1):
            key = array[at : at + self._window].tobytes()
            for chunk_id, start in self._windows.get(key, ())[:64]:
                if chunk_id in self._ids:
                    diagonals[chunk_id, at - start] = None
        stored = self._tokens_of(list({chunk_id for chunk_id, _ in diagonals}))
        runs: list[tuple[int, Span]] = []
        for chunk_id, diagonal in diagonals:
            if chunk_id in stored:
                runs += self._runs(array, chunk_id, stored[chunk_id], diagonal)
        runs.sort(key=lambda run: (-run[0], run[1].chunk_id))
        return resolve((span for _, span in runs), self._shortest)

    def _runs(
        self, prompt: np.ndarray, chunk_id: str, stored: StoredTokens, diagonal: int
    ) -> list[tuple[int, Span]]:
        low = max(0, diagonal)
        high = min(len(prompt), diagonal + len(stored.tokens))
        differs = prompt[low:high] != stored.tokens[low - diagonal : high - diagonal]
        edges = np.concatenate(([low - 1], low + np.flatnonzero(differs), [high]))
        base = len(stored.context)
        found = []
        for index in np.flatnonzero(np.diff(edges) > self._shortest):
            dst, end = int(edges[index]) + 1, int(edges[index + 1])
            src = dst - diagonal
            left = 0
            if src == 0:
                shared = min(base, dst)
                same = (prompt[dst - shared : dst] == stored.context[base - shared :])[::-1]
                left = shared if same.all() else int(np.argmin(same))
            exact = src == 0 and dst == base and left == base
            found.append((left, Span(chunk_id, src, dst, end - dst, base, exact)))
        return found
