"""Chunks' KV as they are stored, kept from one context to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from benchmarks.quality_real.network import Cache, Network
from semkv_rag.corpus.context import PASSAGE

KEPT = 400
"""Chunks, the ones used last: 1 GB or less of a small model at 192 tokens each."""

Made = TypeVar("Made")


class Shelf:
    """What chunks are behind other text, each computed once while it is kept.

    Attributes:
        shared: whether several questions are asked on the same passages.
        passage: the built-in text that stands before a document's first chunk.
    """

    def __init__(self, network: Network, *, shared: bool = False) -> None:
        self.shared = shared
        self._network = network
        self.passage = tuple(network.tokenizer.encode(PASSAGE, add_special_tokens=False))
        self.chunk = lru_cache(KEPT)(self._computed)
        self._behind = lru_cache(1)(network.prefill)
        self._left = lru_cache(1)(lambda prefix, left: network.prefill(left, self._behind(prefix)))
        self._prompt: tuple[int, ...] = ()
        self._made: dict[str, Any] = {}

    def once(self, prompt: tuple[int, ...], name: str, make: Callable[[], Made]) -> Made:
        """What does not depend on the question, for all questions on a prompt; the last one's is kept."""
        if prompt != self._prompt:
            self._prompt, self._made = prompt, {}
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def _computed(
        self, prefix: tuple[int, ...], left: tuple[int, ...], tokens: tuple[int, ...]
    ) -> Cache:
        """The KV of a chunk's tokens alone, behind the prompt prefix and the text to its left, if any."""
        before = self._left(prefix, left) if left else self._behind(prefix)
        kv, base = self._network.prefill(tokens, before), before.keys.shape[2]
        return Cache(kv.keys[:, :, base:].clone(), kv.values[:, :, base:].clone())
