"""How long the tiers take to find a stored prompt, and what one weighs.

    python benchmarks/tiers.py [--prompts 1000 100000 1000000] [--repeats 200]

A store's index with that many prompts of 64 tokens and vectors of 384 numbers, without chunk files,
which no look-up reads. The encoder hands out made-up vectors, so its time is next to nothing; it is
taken off all the same. One core, one thread. A fresh prompt in each repeat:

exact      a stored text in capitals
semantic   a text that is not stored, whose vector has a similarity of about 0.9 to a stored one's
miss       a text and a vector that are like nothing stored
unchanged  asking whether another process stored something: part of both of the above

`found` is the share of the semantic look-ups that name the very prompt that the vector was made from.
`while_built_ms` are bare searches while the graph is built, which compare all vectors, one a second.
Memory is the growth of the process's resident set from opening the cascade, and once the graph, where
there is one, has taken over and what it was made from is gone.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from sqlalchemy import insert

from semkv_rag.prompt_cache import (
    CallableEncoder,
    Cascade,
    Lookup,
    Normalisation,
    PromptCacheOptions,
)
from semkv_rag.prompt_cache.normalise import prompt_key
from semkv_rag.prompt_cache.vectors.index import GRAPH_FROM, Vectors, normalised
from semkv_rag.store import KVStore, VectorKey, chunk_id
from semkv_rag.store.files.header import token_bytes
from semkv_rag.store.index import feed, schema
from workbench.figures import save, summary

DIM = 384
TOKENS = 64
MODEL = "b" * 64
KEY = VectorKey("semantic", "made up")
BATCH = 2000
EXACT_TARGET_MS, SEMANTIC_TARGET_MS = 1.0, 10.0
NOISE = 0.484  # a vector of this length, at right angles, makes the similarity 0.9

_NO_TOKENS = np.zeros(0, dtype=np.int32)


def text_of(number: int) -> str:
    """A prompt of about 300 characters."""
    return f"Question {number}: which of the reports of section {number % 997} says so? " * 5


def tokens_of(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(number).integers(0, 50_000, TOKENS, dtype=np.int32)


def vectors_of(numbers: Sequence[int]) -> Vectors:
    """Those of a text's number, [numbers, 384]: around 2,000 topics, as sentences' are."""
    found = []
    for number in numbers:
        topic = np.random.default_rng(number % 2000 + (1 << 40)).standard_normal(DIM)
        own = np.random.default_rng(number).standard_normal(DIM)
        found.append(topic + own)
    return normalised(np.asarray(found, np.float32))


def near(numbers: Sequence[int]) -> Vectors:
    """Vectors of a similarity of about 0.9 to those of these numbers."""
    noise = np.random.default_rng(list(numbers)).standard_normal((len(numbers), DIM))
    return normalised(vectors_of(numbers) + NOISE * normalised(noise.astype(np.float32)))


class Encoder:
    """Hands out the vectors that were laid out for the next text."""

    def __init__(self) -> None:
        self.next = vectors_of([0])
        self.encoder = CallableEncoder(KEY.encoder, lambda _texts: self.next)


def fill(store: KVStore, count: int) -> None:
    """Write the index's rows of `count` prompts."""
    store.add_model(MODEL, {})
    normalise = Normalisation()
    context = {"digest": "0" * 64, "tokens": b""}
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        rows: dict[str, list[dict[str, object]]] = {
            name: [] for name in ("chunks", "chunk_tokens", "prompts", "embeddings")
        }
        with store._database.writing(durable=False) as connection:
            if first == 0:
                connection.execute(insert(schema.contexts), [context])
            seq = feed.advance(connection)
            for number, vector in zip(numbers, vectors_of(numbers), strict=True):
                tokens = tokens_of(number)
                id_ = chunk_id(MODEL, "default", _NO_TOKENS, tokens)
                own = {"model": MODEL, "namespace": "default"}
                at = {"created_at": 1.0}
                rows["chunks"].append(
                    {"id": id_, **own, **at, "kind": "prompt", "context": "0" * 64, "used_at": 1.0}
                    | {"token_count": TOKENS, "context_count": 0, "ranks": 1, "bytes": 1}
                )
                rows["chunk_tokens"].append({"chunk_id": id_, "tokens": token_bytes(tokens)})
                text = text_of(number)
                rows["prompts"].append(
                    {"chunk_id": id_, **own, **at, "key": prompt_key(normalise(text))}
                    | {"text": text, "images": "", "source_version": ""}
                )
                rows["embeddings"].append(
                    {"chunk_id": id_, "layer": KEY.layer, "encoder": KEY.encoder}
                    | {"seq": seq, "vector": vector.tobytes()}
                )
            for name, values in rows.items():
                connection.execute(insert(schema.metadata.tables[name]), values)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def timed(repeats: int, ask: Callable[[int], Lookup]) -> tuple[dict[str, float], list[Lookup]]:
    """ms of look-ups without their encoders, and the look-ups."""
    for number in range(5):
        ask(number)
    found = [ask(number) for number in range(repeats)]
    return summary([lookup.lookup_ms - lookup.encode_ms for lookup in found]), found


def measure(count: int, repeats: int, folder: Path) -> dict[str, Any]:
    """All figures of a store with `count` prompts."""
    source = Encoder()
    with KVStore(folder) as store:
        fill(store, count)
        before = resident_bytes()
        started, cpu = time.perf_counter(), time.process_time()
        options = PromptCacheOptions(threshold=0.85)
        with Cascade(store, MODEL, options, {KEY.layer: source.encoder}) as cascade:
            opened_s = time.perf_counter() - started
            index = cascade._indexes._indexes["default", KEY]
            chosen = np.random.default_rng(1).integers(0, count, repeats + 5).tolist()
            waited = []
            while count > GRAPH_FROM and not index.is_graph:
                asked = time.perf_counter()
                index.search(near(chosen[:1])[0], options.top_k)
                waited.append(1000 * (time.perf_counter() - asked))
                time.sleep(1)
            ready_s = time.perf_counter() - started
            built_s = time.process_time() - cpu
            memory = resident_bytes() - before

            def exact(number: int) -> Lookup:
                asked = chosen[number]
                return cascade.lookup(text_of(asked).upper(), tokens_of(asked))

            def semantic(number: int) -> Lookup:
                source.next = near([chosen[number]])
                return cascade.lookup(f"another {number}", tokens_of(-1 + (1 << 50)))

            def miss(number: int) -> Lookup:
                source.next = vectors_of([(1 << 45) + number])
                return cascade.lookup(f"another {number}", tokens_of(-1 + (1 << 50)))

            exact_ms, exact_found = timed(repeats, exact)
            semantic_ms, semantic_found = timed(repeats, semantic)
            miss_ms, miss_found = timed(repeats, miss)
            assert all(lookup.statuses["exact_text"] == "hit" for lookup in exact_found)
            assert not any(lookup.served for lookup in miss_found)
            unchanged = []
            for _ in range(repeats):
                started = time.perf_counter()
                cascade._indexes.refresh()
                unchanged.append(1000 * (time.perf_counter() - started))
            named = [
                lookup.served is not None and lookup.served.donor.text == text_of(asked)
                for lookup, asked in zip(semantic_found, chosen, strict=False)
            ]
            return {
                "prompts": count,
                "index": "graph" if index.is_graph else "flat",
                "exact_ms": exact_ms,
                "semantic_ms": semantic_ms,
                "miss_ms": miss_ms,
                "unchanged_ms": summary(unchanged),
                "found": round(float(np.mean(named)), 4),
                "opened_s": round(opened_s, 2),
                "ready_s": round(ready_s, 2),
                "ready_cpu_s": round(built_s, 2),
                "while_built_ms": summary(waited) if waited else None,
                "memory_bytes": round(memory / count),
                "database_bytes": round((folder / "index.sqlite").stat().st_size / count),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = []
    for count in arguments.prompts:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(count, arguments.repeats, Path(folder))
        results.append(figures)
        print(f"{count:,} prompts ({figures['index']})")
        for name in ("exact", "semantic", "miss", "unchanged"):
            ms = figures[f"{name}_ms"]
            print(f"  {name:<10} {ms['median']:8.3f} ms ({ms['min']:.3f} to {ms['max']:.3f})")
        print(
            f"  found {figures['found']:.1%} · opened in {figures['opened_s']} s, ready after"
            f" {figures['ready_s']} s ({figures['ready_cpu_s']} s computing), a search meanwhile"
            f" {figures['while_built_ms']} ms · {figures['memory_bytes']:,} bytes a prompt in memory,"
            f" {figures['database_bytes']:,} in the index"
        )

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for name, target in (("exact", EXACT_TARGET_MS), ("semantic", SEMANTIC_TARGET_MS)):
            medians = [figures[f"{name}_ms"]["median"] for figures in results]
            (line,) = axes.plot(arguments.prompts, medians, "o-", label=name)
            axes.axhline(target, color=line.get_color(), linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="stored prompts", ylabel="look-up, ms")
        axes.legend()

    print(save("tiers", {"results": results}, plot))


if __name__ == "__main__":
    main()
