"""A blend that computes everything is plain prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semkv_rag.cli.deep.prompts import Stored, blended, largest_difference, plain
from semkv_rag.cli.deep.result import FIX, Result
from semkv_rag.cli.output import in_words
from semkv_rag.engine import Engine

TOLERANCES = {"float32": 0.01, "float16": 0.15, "bfloat16": 0.5}
"""Of log-probabilities, in nats: kernels add up in another order in batches of another shape."""


def check_equality(engine: Engine, about: Mapping[str, Any], prompt: Stored) -> Result:
    """Whether the ratio 1.0 gives plain vLLM's answer."""
    case = in_words(len(prompt.tokens), "token")
    blend, alone = blended(engine, prompt, ratio=1.0), plain(engine, prompt.tokens)
    figures = {
        "largest_difference_nats": largest_difference(blend, alone),
        "reused_tokens": blend.report.reused_tokens,
    }
    if not figures["reused_tokens"]:
        message = f"nothing was reused: {blend.report.reason}"
        return Result("ratio 1.0", case, "fail", figures, message, FIX)
    if not figures["largest_difference_nats"] <= TOLERANCES[about["dtype"]]:
        message = "a blend that computes everything is not what plain vLLM answers"
        return Result("ratio 1.0", case, "fail", figures, message, FIX)
    return Result("ratio 1.0", case, "ok", figures)
