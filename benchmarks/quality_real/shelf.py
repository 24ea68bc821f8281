"""Chunks' KV as they are stored, kept from one context to the next."""

from __future__ import annotations

from functools import lru_cache

from benchmarks.quality_real.network import Cache, Network
from semkv_rag.corpus.context import PASSAGE

KEPT = 600
"""Chunks, the ones used last: about 1 GB of a model of 0.5 billion parameters at 192 tokens each."""


class Shelf:
    """What chunks are behind other text, each computed once while it is kept.

    Attributes:
        passage: the built-in text that stands in the place of a missing left neighbour.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.passage = tuple(network.tokenizer.encode(PASSAGE, add_special_tokens=False))
        self.chunk = lru_cache(KEPT)(self._computed)
        self._behind = lru_cache(1)(network.prefill)

    def _computed(
        self, prefix: tuple[int, ...], left: tuple[int, ...], tokens: tuple[int, ...]
    ) -> Cache:
        """The KV of a chunk's tokens alone, behind the prompt prefix and a left neighbour, if any."""
        before = self._behind(prefix)
        if left:
            one = self.chunk(prefix, (), left)
            before = before.joined(one)
        kv, base = self._network.prefill(tokens, before), before.keys.shape[2]
        return Cache(kv.keys[:, :, base:].clone(), kv.values[:, :, base:].clone())
