"""Whole prompts that resemble an earlier one: the tiers around an engine of your own.

    python examples/tiers.py

One prompt is stored ahead, as `semkv warm` does for a file of them. Asked again, its KV comes out of the
store; another question about the same documents reuses all but the question, and gets its own answer.
Without `observe` the engine would store the first prompt by itself, after answering it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from semkv_rag import Engine
from semkv_rag.prompt_cache import PromptCacheOptions

HERE = Path(__file__).resolve().parent
MODEL = str(HERE / "reader")
STORE = HERE.parent / "build" / "tiers-store"
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
DOCUMENTS = ("brak-trut", "mir-bol")
SAMPLING = {"max_tokens": 4, "temperature": 0.0}


def prompt(question: str) -> str:
    texts = [(HERE / "corpus" / "projects" / f"{name}.txt").read_text() for name in DOCUMENTS]
    return " ".join(" ".join(texts).split()) + f" Question : {question} Answer :"


def show(engine: Engine) -> None:
    stored = prompt("which mascot does Brak trut have ?")
    engine.observe(stored)
    asked = {
        "the same": stored,
        "with other white space": stored.replace(" ", "  "),
        "another question": prompt("which mascot does Mir bol have ?"),
    }
    for name, text in asked.items():
        engine.reset_prefix_cache()  # to see what the store does, and not vLLM's own cache
        answer = engine.generate(text, sampling=SAMPLING)
        report = answer.report
        reused = report.exact_tokens + report.reused_tokens
        print(
            f"{name}: {answer.text.strip()}; served by {report.served_by}, similarity"
            f" {report.similarity}, {reused} of {report.prompt_tokens} tokens reused"
        )


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with Engine(MODEL, store=STORE, prompt_cache=PromptCacheOptions(), **ENGINE_ARGS) as engine:
        show(engine)


if __name__ == "__main__":
    main()
