"""What precompute costs by context mode: time, computed tokens and bytes of the same documents.

    python benchmarks/contexts.py [--documents 4] [--chunks 6] [--tokens 256] [--repeats 3]

Each set of modes stores fresh documents of random words behind a head, in turns, in one engine. A
neighbour that vLLM's prefix cache still holds costs nothing; beside the time stands the worst case in
tokens, all contexts computed.

Writes build/bench/contexts.json and contexts.png. About 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ttft import Shape, build_model
from semkv_rag.corpus import ContextMode, precompute_texts
from semkv_rag.engine import Engine
from workbench.figures import save, summary

HEAD = "every answer is short and stands somewhere in the documents that were found for it\n\n"
MODES: tuple[tuple[ContextMode, ...], ...] = (
    ("head",),
    ("left",),
    ("similar",),
    ("head", "left"),
    ("head", "left", "similar"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=6, help="of each document")
    parser.add_argument("--tokens", type=int, default=256, help="of each chunk")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(build_model(Path(folder) / "mid"), Path(folder) / "store", arguments)
    path = save("contexts", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(model: Path, store: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    engine_args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    rows: dict[str, list[dict[str, float]]] = {" + ".join(modes): [] for modes in MODES}
    with Engine(str(model), store=store, **engine_args) as engine:
        for repeat in range(arguments.repeats + 1):  # the first warms up
            for number, modes in enumerate(MODES):
                rng = random.Random(repeat * len(MODES) + number)
                texts = documents(engine.tokenizer, rng, arguments)
                row = store_once(engine, texts, modes, f"run-{repeat}-{number}")
                if repeat:
                    rows[" + ".join(modes)].append(row)
    base = rows["head"]
    result: dict[str, Any] = {}
    for name, measured in rows.items():
        result[name] = {
            "seconds": summary([row["seconds"] for row in measured]),
            "times_head": summary(
                [row["seconds"] / one["seconds"] for row, one in zip(measured, base, strict=True)]
            ),
            "bytes_times_head": round(measured[0]["bytes"] / base[0]["bytes"], 3),
            "tokens_at_worst_times_head": round(
                measured[0]["tokens_at_worst"] / base[0]["tokens_at_worst"], 3
            ),
            "runs": measured,
        }
        print(f"{name:24}", {key: value for key, value in result[name].items() if key != "runs"})
    return {
        "model": {**Shape.of(model).__dict__, "dtype": "bfloat16", "weights": "random"},
        **{key: getattr(arguments, key) for key in ("documents", "chunks", "tokens", "repeats")},
        "head": HEAD,
        "modes": result,
    }


def documents(
    tokenizer: Any, rng: random.Random, arguments: argparse.Namespace
) -> list[tuple[str, list[str]]]:
    """Random words, the given number of tokens in each chunk or a few less."""

    def chunk() -> str:
        words: list[str] = []
        tokens = 0
        while True:
            word = "".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8)))
            tokens += len(tokenizer.encode(f" {word}"))
            if tokens > arguments.tokens:
                return " ".join(words)
            words.append(word)

    return [
        (f"document-{number}", [chunk() for _ in range(arguments.chunks)])
        for number in range(arguments.documents)
    ]


def store_once(
    engine: Engine,
    texts: Sequence[tuple[str, list[str]]],
    modes: Sequence[ContextMode],
    namespace: str,
) -> dict[str, float]:
    result = precompute_texts(engine, texts, namespace=namespace, head=HEAD, context=modes)
    assert not result.failures and engine.store is not None
    records = list(engine.store.chunks(engine.fingerprint, namespace))
    return {
        "seconds": result.computing_seconds,
        "bytes": result.bytes,
        "tokens_at_worst": sum(one.token_count + one.context_count for one in records),
    }


def draw(figure: Any, figures: dict[str, Any]) -> None:
    axes = figure.subplots()
    names = list(figures["modes"])
    width = 0.25
    for offset, (measure_name, label) in enumerate(
        (
            ("times_head", "time"),
            ("bytes_times_head", "bytes"),
            ("tokens_at_worst_times_head", "tokens, nothing in the prefix cache"),
        )
    ):
        values = [figures["modes"][name][measure_name] for name in names]
        heights = [value["median"] if isinstance(value, dict) else value for value in values]
        places = [place + (offset - 1) * width for place in range(len(names))]
        axes.bar(places, heights, width, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1, color="grey", linestyle=":")
    axes.set_ylabel("times that of head")
    axes.set_title("Precompute by context mode")
    axes.legend()


if __name__ == "__main__":
    main()
