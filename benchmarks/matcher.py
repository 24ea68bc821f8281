"""How long the matcher takes to find chunks in a prompt, and what the index weighs.

    python benchmarks/matcher.py [--chunks 10000 100000 1000000] [--repeats 30] [--variants 2]

Stores of chunks of 512 tokens, behind a prompt prefix of 32 and, with two variants, half of them again
behind the prefix and the chunk before; prompts of 8,192. Ids are drawn log-uniformly from a vocabulary of
50,000, so that frequent tokens are frequent, and every tenth chunk starts with the same 32 tokens,
so that the windows there are crowded. Prompts, a fresh one in each repeat:

stored       16 stored chunks at odd offsets, with other text between them
miss         text that is not stored
boilerplate  the 32 shared tokens again and again, with other text between them
neighbours   32 halves of stored chunks one after another
document     16 stored chunks that are neighbours, with 2 other tokens between them
one token    the same token 8,192 times, against a store that holds such a chunk as well

The chunks are added in memory, then written to a window file as an engine does it, and found from there.

Tokens are computed from the chunk's number whenever they are asked for, and the time of that is
part of the match; in an engine the store's look-up stands there. Processor time is given beside
the time that passed: on a machine with other work the two differ.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse import ChunkIndex, Span, StoredTokens, TokenArray
from semkv_rag.reuse.base import Base
from semkv_rag.store.files.window_file import WindowFile, write_windows
from workbench.figures import save, summary

CHUNK_TOKENS = 512
PROMPT_TOKENS = 8192
VOCABULARY = 50_000
STORED_PER_PROMPT = 16
BOILERPLATE_TOKENS = 32
BOILERPLATE_EVERY = 10
ADD_BATCH = 1000
TARGET_MS = 5

PREFIX_TOKENS = 32
LEFT = 1 << 40
"""Added to the number of a chunk: its variant behind its neighbour."""

_ONE_TOKEN = "e" * 64


def tokens_of_seeds(seeds: NDArray[np.uint64]) -> TokenArray:
    """Token ids by a counter-based generator, log-uniform over the vocabulary, [len(seeds)]."""
    bits = seeds * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    uniform = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return np.exp(uniform * np.float32(np.log(VOCABULARY))).astype(np.int32)


BOILERPLATE = tokens_of_seeds(np.arange(BOILERPLATE_TOKENS, dtype=np.uint64))
PREFIX = tokens_of_seeds(np.arange(PREFIX_TOKENS, dtype=np.uint64) + np.uint64(1 << 50))


def chunks(numbers: NDArray[np.int64]) -> TokenArray:
    """The tokens of the chunks with these numbers, [chunks, CHUNK_TOKENS]."""
    first = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(CHUNK_TOKENS)
    tokens = tokens_of_seeds(first[:, None] + np.arange(CHUNK_TOKENS, dtype=np.uint64))
    tokens[numbers % BOILERPLATE_EVERY == 0, :BOILERPLATE_TOKENS] = BOILERPLATE
    return tokens


def chunk_id(number: int) -> str:
    """An id as long as the store's."""
    return f"{number:016x}".ljust(64, "0")


def stored_tokens(ids: Sequence[str]) -> Mapping[str, StoredTokens]:
    """The look-up of the index, computed instead of stored."""
    numbered = [chunk for chunk in ids if chunk != _ONE_TOKEN]
    numbers = np.array([int(chunk[:16], 16) for chunk in numbered], dtype=np.int64)
    rows, before = chunks(numbers % LEFT), chunks(np.maximum(numbers % LEFT - 1, 0))
    found = {}
    for chunk, number, tokens, neighbour in zip(numbered, numbers, rows, before, strict=True):
        context = PREFIX if number < LEFT else np.concatenate((PREFIX, neighbour))
        found[chunk] = StoredTokens(tokens, context)
    if len(numbered) < len(ids):
        found[_ONE_TOKEN] = StoredTokens(np.full(CHUNK_TOKENS, 7, dtype=np.int32), PREFIX)
    return found


def build(count: int, variants: int) -> tuple[ChunkIndex, float]:
    """An index of `count` chunks, all variants counted, and the seconds that `add` took in all."""
    index = ChunkIndex(stored_tokens)
    index.add([(_ONE_TOKEN, np.full(CHUNK_TOKENS, 7, dtype=np.int32))])
    seconds = 0.0
    texts, step = count // variants, ADD_BATCH // variants
    for first in range(0, texts, step):
        numbers = np.arange(first, min(first + step, texts))
        numbers = np.concatenate([numbers + LEFT * variant for variant in range(variants)])
        batch = list(zip(map(chunk_id, numbers.tolist()), chunks(numbers % LEFT), strict=True))
        started = time.perf_counter()
        index.add(batch)
        seconds += time.perf_counter() - started
    return index, seconds


def in_a_file(index: ChunkIndex, folder: Path) -> tuple[ChunkIndex, int, float]:
    """The same chunks in a window file; its size in bytes, and the seconds that writing it took."""
    started = time.perf_counter()
    sections = index.pack()()
    assert sections is not None
    path = folder / "windows.safetensors"
    size = write_windows(path, "benchmark", "default", 0, sections)
    seconds = time.perf_counter() - started
    base = Base(WindowFile(path, "benchmark", "default"), 8)
    return ChunkIndex(stored_tokens, base=base), size, seconds


class Prompts:
    """Endless prompts of each kind over a store of `count` texts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._random = np.random.default_rng(count)
        self._fresh = 1 << 60  # seeds no chunk uses

    def stored(self) -> TokenArray:
        """16 whole chunks, cut to 490 to 512 tokens, with 1 to 20 other tokens between them."""
        parts = []
        for number in self._random.integers(self._count, size=STORED_PER_PROMPT):
            parts.append(self._text(int(self._random.integers(1, 20))))
            cut = self._random.integers(0, 12, size=2)
            parts.append(self._chunk(int(number))[cut[0] : CHUNK_TOKENS - cut[1]])
        return self._fill(parts)

    def miss(self) -> TokenArray:
        return self._text(PROMPT_TOKENS)

    def boilerplate(self) -> TokenArray:
        parts = []
        for _ in range(PROMPT_TOKENS // (BOILERPLATE_TOKENS + 16)):
            parts += [BOILERPLATE, self._text(16)]
        return self._fill(parts)

    def neighbours(self) -> TokenArray:
        numbers = self._random.integers(self._count, size=2 * STORED_PER_PROMPT).tolist()
        half = CHUNK_TOKENS // 2
        return self._fill([self._chunk(number)[half:] for number in numbers])

    def document(self) -> TokenArray:
        first = int(self._random.integers(self._count - STORED_PER_PROMPT))
        parts = [PREFIX]
        for number in range(first, first + STORED_PER_PROMPT):
            parts += [self._chunk(number), self._text(2)]
        return self._fill(parts)

    def one_token(self) -> TokenArray:
        return np.full(PROMPT_TOKENS, 7, dtype=np.int32)

    def _chunk(self, number: int) -> TokenArray:
        return chunks(np.array([number]))[0]

    def _text(self, tokens: int) -> TokenArray:
        self._fresh += tokens
        return tokens_of_seeds(np.arange(self._fresh, self._fresh + tokens, dtype=np.uint64))

    def _fill(self, parts: list[TokenArray]) -> TokenArray:
        return np.concatenate([*parts, self._text(PROMPT_TOKENS)])[:PROMPT_TOKENS]


def measure(
    index: ChunkIndex, make_prompt: Callable[[], TokenArray], repeats: int
) -> dict[str, Any]:
    """Match times over `repeats` prompts, after two that are not counted."""
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    spans: list[Span] = []
    for repeat in range(repeats + 2):
        prompt = make_prompt()
        started, cpu_started = time.perf_counter(), time.thread_time()
        spans = index.match(prompt)
        elapsed, cpu = time.perf_counter() - started, time.thread_time() - cpu_started
        if repeat >= 2:
            times_ms.append(elapsed * 1e3)
            cpu_ms.append(cpu * 1e3)
    covered = sum(span.length for span in spans)
    return {
        "match_ms": summary(times_ms),
        "match_cpu_ms": summary(cpu_ms),
        "last_spans": len(spans),
        "last_covered_share": round(covered / PROMPT_TOKENS, 4),
    }


def one_by_one(index: ChunkIndex, first: int, repeats: int) -> dict[str, float]:
    """Milliseconds to add one chunk at a time to a store in use."""
    times_ms = []
    for number in range(first, first + repeats):
        chunk = [(chunk_id(number), chunks(np.array([number]))[0])]
        started = time.perf_counter()
        index.add(chunk)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return summary(times_ms)


def run(counts: Sequence[int], repeats: int, variants: int) -> Iterator[dict[str, Any]]:
    """The figures of each store size."""
    for count in counts:
        built, seconds = build(count, variants)
        in_memory = built.nbytes / len(built)
        with TemporaryDirectory() as folder:
            index, size, writing = in_a_file(built, Path(folder))  # open files stay readable
        del built
        prompts = Prompts(count // variants)
        kinds = {
            "stored": prompts.stored,
            "miss": prompts.miss,
            "boilerplate": prompts.boilerplate,
            "neighbours": prompts.neighbours,
            "document": prompts.document,
            "one token": prompts.one_token,
        }
        gc.collect()
        measured = {name: measure(index, make, repeats) for name, make in kinds.items()}
        figures = {
            "chunks": count,
            "bytes_per_chunk": round(index.nbytes / len(index), 1),
            "file_bytes_per_chunk": round(size / len(index), 1),
            "bytes_per_new_chunk": round(in_memory, 1),
            "writing_s": round(writing, 2),
            "add_us_per_chunk": round(seconds / count * 1e6, 1),
            "prompts": measured,
            "add_one_ms": one_by_one(index, count, 200),
            "peak_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        print(f"{count:>9,} chunks: {figures['bytes_per_chunk']:,} B per chunk, "
              f"added in {figures['add_us_per_chunk']} µs each", flush=True)  # fmt: skip
        for name, result in measured.items():
            ms = result["match_ms"]
            print(f"    {name:<12} {ms['median']:7.2f} ms  ({ms['min']:.2f} to {ms['max']:.2f}; "
                  f"{result['match_cpu_ms']['median']:.2f} ms of processor time), "
                  f"{result['last_spans']} spans over {result['last_covered_share']:.1%}")  # fmt: skip
        yield figures


def draw(figure: Any, sizes: Sequence[Mapping[str, Any]]) -> None:
    """Match time by store size, a line for each kind of prompt; processor time beside it."""
    panels = figure.subplots(1, 2, sharey=True)
    counts = [size["chunks"] for size in sizes]
    titles = {"match_ms": "time passed", "match_cpu_ms": "processor time"}
    for axes, (measure_name, title) in zip(panels, titles.items(), strict=True):
        for name in sizes[0]["prompts"]:
            times = [size["prompts"][name][measure_name] for size in sizes]
            medians = [time["median"] for time in times]
            spread = [
                [time["median"] - time["min"] for time in times],
                [time["max"] - time["median"] for time in times],
            ]
            axes.errorbar(counts, medians, yerr=spread, marker="o", capsize=3, label=name)
        axes.axhline(TARGET_MS, color="grey", linestyle=":", label=f"target {TARGET_MS} ms")
        axes.set(xscale="log", xlabel=f"stored chunks of {CHUNK_TOKENS} tokens", title=title)
    panels[0].set(yscale="log", ylabel=f"ms per prompt of {PROMPT_TOKENS} tokens: median, min, max")
    panels[1].legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--variants", type=int, choices=(1, 2), default=1, help="of each text")
    options = parser.parse_args()
    sizes = list(run(options.chunks, options.repeats, options.variants))
    figures = {
        "chunk_tokens": CHUNK_TOKENS,
        "prompt_tokens": PROMPT_TOKENS,
        "variants": options.variants,
        "sizes": sizes,
    }
    name = "matcher" if options.variants == 1 else f"matcher-{options.variants}-variants"
    print(save(name, figures, lambda figure: draw(figure, sizes)))


if __name__ == "__main__":
    main()
