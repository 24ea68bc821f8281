"""What the metrics say of the engine: whether it reuses KV, its store, its prompt cache, captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.totals import Totals
from semkv_rag.store import KVStore

SERVABLE: Final = "semkv_servable"
CHUNKS: Final = "semkv_store_chunks"
BYTES: Final = "semkv_store_bytes"
EVICTED: Final = "semkv_evicted_total"
CAPTURES: Final = "semkv_captures_total"
PROMPT_CACHE: Final = "semkv_prompt_cache_requests_total"

TEXTS: Final = {
    SERVABLE: "Whether prompts are answered with reuse: 1, or 0 where the gate refused.",
    CHUNKS: "Chunks in the store, of all namespaces and models.",
    BYTES: "What the chunks in the store take.",
    EVICTED: "Chunks and images' features that this process took away.",
    CAPTURES: "Chunks and prompts whose KV was to be stored, by what became of it.",
    PROMPT_CACHE: "Requests that were looked up in the prompt cache, by tier and its status.",
}
"""What each metric counts."""


class Stored(NamedTuple):
    """What is in a store."""

    chunks: int
    bytes: int


class Sample(NamedTuple):
    """One value of one metric, with the names and values of its own labels."""

    metric: str
    labels: dict[str, str]
    value: float


def stored_in(store: KVStore) -> Stored:
    """Counts what is stored, which takes a while in a large store.

    Raises:
        StoreError: the index does not answer.
    """
    stats = store.stats()
    return Stored(sum(one.chunks for one in stats), sum(one.bytes for one in stats))


def samples(
    totals: Totals, capturer: LLMCapturer | None, stored: Stored | None, *, servable: bool
) -> Iterator[Sample]:
    """All values.

    Args:
        totals: of the engine's requests.
        capturer: None without a store.
        stored: None where that is not known.
        servable: whether the model is served with reuse.
    """
    yield Sample(SERVABLE, {}, float(servable))
    for (tier, status), count in sorted(totals.tiers.items()):
        yield Sample(PROMPT_CACHE, {"tier": tier, "outcome": status}, count)
    if capturer is not None:
        for outcome, count in sorted(capturer.ended.items()):
            yield Sample(CAPTURES, {"outcome": outcome}, count)
        yield Sample(EVICTED, {}, capturer.store.lifecycle.evicted)
    if stored is not None:
        yield Sample(CHUNKS, {}, stored.chunks)
        yield Sample(BYTES, {}, stored.bytes)
