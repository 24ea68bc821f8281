"""Chunks of random tokens and prompts made of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from semkv_rag.corpus.capture import CaptureItem, Capturer
from semkv_rag.engine import Engine
from semkv_rag.reuse import Span, token_array
from semkv_rag.store import ChunkKey, chunk_id

Tokens = list[int]


def random_tokens(seed: int, count: int, vocabulary: int = 480) -> Tokens:
    """`count` tokens that no other seed gives; special tokens (below 8) are left out."""
    rng = random.Random(seed)
    return [rng.randrange(8, vocabulary) for _ in range(count)]


@dataclass(frozen=True)
class Stored:
    """A chunk in the engine's store."""

    id: str
    tokens: Tokens
    context: Tokens

    def at(self, dst: int, *, src: int = 0, length: int | None = None) -> Span:
        """The span of this chunk's tokens from `src` at prompt position `dst`."""
        length = len(self.tokens) - src if length is None else length
        base = len(self.context)
        return Span(self.id, src, dst, length, base=base, exact=False)


def store_chunks(
    engine: Engine | Capturer,
    chunks: Sequence[Tokens],
    *,
    namespace: str,
    context: Sequence[int] = (),
    reference: Sequence[int] | None = None,
) -> list[Stored]:
    """Capture chunks and index them, as precompute does; every one must succeed.

    Args:
        engine: or one with an adapter.
        reference: another context, with which they are compared.
    """
    assert engine.store is not None
    items = []
    for tokens in chunks:
        own, before = token_array(tokens), token_array(list(context))
        other = None if reference is None else token_array(list(reference))
        identity = chunk_id(engine.fingerprint, namespace, before, own)
        items.append(CaptureItem(identity, namespace, "document", own, before, other))
    results = list(engine.capture(items))
    assert [result.error for result in results] == [None] * len(items)
    keys = [ChunkKey(item.id, engine.fingerprint, namespace) for item in items]
    assert engine.store.add(keys) == {item.id for item in items}
    return [
        Stored(item.id, list(tokens), list(context))
        for item, tokens in zip(items, chunks, strict=True)
    ]
