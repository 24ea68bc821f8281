"""Time to first token of plain prefill and of a blend."""

from __future__ import annotations

from semkv_rag.cli.deep.prompts import Stored, another_question, blended, forget, plain
from semkv_rag.cli.deep.result import Result
from semkv_rag.cli.output import in_words
from semkv_rag.engine import Engine

REPEATS = 2


def check_latency(engine: Engine, prompt: Stored) -> Result:
    """The best of some, in turns, each with a question of its own.

    Both have run at this length before.
    """
    plains, blends = [], []
    for number in range(REPEATS):
        asked = another_question(engine, prompt, number)
        plains.append(plain(engine, asked.tokens, max_tokens=1).ttft_ms)
        forget(engine)
        blends.append(blended(engine, asked, max_tokens=1))
    blend = min(blends, key=lambda one: one.ttft_ms)
    figures = {
        "plain_ms": min(plains),
        "blend_ms": blend.ttft_ms,
        "speedup": min(plains) / blend.ttft_ms,
        "load_ms": blend.report.load_ms,
        "charged_ratio": blend.report.charged_ratio,
    }
    case = in_words(len(prompt.tokens), "token")
    if figures["speedup"] < 1:
        fix = "look at load_ms: a faster disk helps; or leave prompts of this length to plain vLLM"
        return Result("ttft", case, "warn", figures, "plain prefill is faster", fix)
    return Result("ttft", case, "ok", figures)
