"""A store in memory, and a matcher over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semkv_rag.reuse import ChunkIndex, StoredTokens, token_array


class Shelf:
    """Chunks in memory behind a `ChunkIndex`, with a note of what the index asked for."""

    def __init__(self, window: int = 8) -> None:
        self.chunks: dict[str, StoredTokens] = {}
        self.asked: list[str] = []
        self.index = ChunkIndex(self.tokens_of, window=window)

    def tokens_of(self, ids: Sequence[str]) -> Mapping[str, StoredTokens]:
        self.asked += ids
        return {chunk_id: self.chunks[chunk_id] for chunk_id in ids if chunk_id in self.chunks}

    def put(self, chunk_id: str, tokens: Sequence[int], context: Sequence[int] = ()) -> None:
        self.chunks[chunk_id] = StoredTokens(token_array(tokens), token_array(context))
        self.index.add([(chunk_id, self.chunks[chunk_id].tokens)])

    def match(self, prompt: Sequence[int]) -> list[tuple[str, int, int, int, bool]]:
        """Spans as (chunk, src, dst, length, exact)."""
        return [
            (span.chunk_id, span.src, span.dst, span.length, span.exact)
            for span in self.index.match(token_array(prompt))
        ]
