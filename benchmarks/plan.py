"""Is `semkv plan` right: what it says of lengths that it did not measure, beside what they then take.

The plan is made as `semkv plan --measure` makes it, from prompts of 500 to 4,000 random tokens. Then real
text is stored by `semkv precompute`'s own function, and prompts of several of its chunks are answered.

    python benchmarks/plan.py [--model FOLDER] [--tokens 1500,3000,6000,7680] [--repeats 3]

Writes build/bench/plan.json. Six minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from semkv_rag import Engine, ReuseOptions
from semkv_rag.cli.deep.prompts import forget
from semkv_rag.cli.measuring import measure
from semkv_rag.corpus import precompute_texts
from semkv_rag.planning import make_plan, model_shape
from workbench.articles import Tokens, article_pieces
from workbench.figures import save

CHUNK = 480
PRESETS = ("balanced", "fast")
GREEDY = {"temperature": 0.0, "max_tokens": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--tokens", default="1500,3000,6000,7680")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.tokens.split(",")]
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(
            str(arguments.model),
            store=Path(folder) / "store",
            max_model_len=max(lengths) + 64,
            kv_cache_memory_bytes=2 << 30,
        ) as engine,
    ):
        figures = compare(engine, arguments.model, lengths, arguments.repeats)
    path = save("plan", {"model": arguments.model.name, **figures})
    for row in figures["rows"]:
        print(f"{row['what']:34} {row['planned']:14,.1f} {row['measured']:14,.1f}", end=" ")
        print(f"{row['planned'] / row['measured']:.2f}")
    print(f"written to {path.relative_to(ROOT)}")


def compare(engine: Engine, model: Path, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Planned and measured, a row for each figure."""
    timing = measure(engine)
    assert engine.store is not None
    before = sum(one.bytes for one in engine.store.stats())
    pieces = article_pieces(engine.tokenizer, 2 * max(lengths) // CHUNK, CHUNK)
    texts = [engine.tokenizer.decode(piece) for piece in pieces]
    stored = precompute_texts(engine, [("articles", texts)])
    assert not stored.failures, stored.failures
    corpus = sum(map(len, pieces))
    plan = make_plan(
        model_shape(str(model)),
        timing,
        machine="this machine",
        storage_gb_per_s=100.0,  # in the page cache
        corpus_tokens=corpus,
        prompts=lengths,
    )
    assert plan.store_bytes is not None and plan.precompute_hours is not None
    written = sum(one.bytes for one in engine.store.stats()) - before
    rows = [
        row("store, MB", plan.store_bytes / 1e6, written / 1e6),
        row("precompute, ms", plan.precompute_hours * 3.6e6, stored.seconds * 1000),
    ]
    for number, planned in enumerate(plan.prompts):
        found = answered(engine, texts, number, planned.tokens, repeats)
        title = f"{planned.tokens:,} tokens"
        rows.append(row(f"{title}, plain, ms", planned.plain_ms, found["plain"]))
        for name, expected in planned.presets.items():
            rows.append(row(f"{title}, {name}, ms", expected.ttft_ms, found[name]))
    return {"corpus_tokens": corpus, "lengths": list(lengths), "repeats": repeats, "rows": rows}


def answered(
    engine: Engine, texts: Sequence[str], number: int, length: int, repeats: int
) -> dict[str, float]:
    """Medians to the first token, plain and by preset; ms. Each time other chunks in another order."""
    times: dict[str, list[float]] = {"plain": [], **{name: [] for name in PRESETS}}
    for repeat in range(repeats + 1):  # the first warms up
        prompt = prompt_of(engine, texts, number * 7 + repeat, length)
        for name in times:
            forget(engine)
            reuse = ReuseOptions(enabled=False) if name == "plain" else ReuseOptions.preset(name)
            answer = engine.generate(prompt, sampling=GREEDY, reuse=reuse)
            assert name == "plain" or answer.report.reused_tokens > length / 2, answer.report
            if repeat:
                times[name].append(answer.ttft_ms)
    return {name: statistics.median(found) for name, found in times.items()}


def prompt_of(engine: Engine, texts: Sequence[str], turn: int, length: int) -> Tokens:
    """Chunks that are no neighbours in the document, and a question; about `length` tokens."""
    tokens: Tokens = []
    place = turn
    while len(tokens) < length - 32:
        tokens += engine.tokenizer.encode(texts[place % len(texts)], add_special_tokens=False)
        place += 3
    question = f"\nQuestion {turn}: what do these passages have in common?\nAnswer:"
    return tokens[: length - 32] + engine.tokenizer.encode(question, add_special_tokens=False)


def row(what: str, planned: float, measured: float) -> dict[str, Any]:
    return {"what": what, "planned": round(planned, 3), "measured": round(measured, 3)}


if __name__ == "__main__":
    main()
