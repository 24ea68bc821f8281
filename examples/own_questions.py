"""How close reuse comes to full prefill on one's own questions: what `semkv quality` does, in Python.

    python examples/own_questions.py

The documents of `examples/corpus` are precomputed, and some of their questions answered by full prefill
and out of the store. A file of your own questions, a model and a store are all that `semkv quality`
needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from semkv_rag import Engine
from semkv_rag.corpus import precompute
from semkv_rag.quality import Template, grid, measure, read_questions

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
MODEL = str(HERE / "reader")
STORE = HERE.parent / "build" / "quality-store"
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
# The one form of prompt that the reader knows.
TEMPLATE = Template("{context} Question : {question} Answer :")


def show(engine: Engine, questions: int = 20) -> None:
    precompute(engine, [CORPUS], chunk_tokens=32)
    result = measure(
        engine,
        read_questions(CORPUS / "questions.json")[:questions],
        settings=grid(["query_attention"], [0.1]),
        template=TEMPLATE,
        max_tokens=4,
    )
    assert result.full is not None and result.recommendation is not None
    for line in result.lines:
        print(
            f"{line.name}: {100 * line.agreement.mean:.1f} % equal tokens, F1 {100 * (line.f1 or 0):.1f},"
            f" charged {100 * line.charged_ratio:.0f} %"
        )
    print(f"full prefill: F1 {100 * (result.full.f1 or 0):.1f}")
    print(f"recommended: {result.recommendation.preset or result.recommendation.selector}")
    print(result.recommendation.reason)


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with Engine(MODEL, store=STORE, **ENGINE_ARGS) as engine:
        show(engine)


if __name__ == "__main__":
    main()
