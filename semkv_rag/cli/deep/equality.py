"""A blend that computes everything is plain prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semkv_rag.cli.deep.prompts import Stored, blended, forget, largest_difference, plain
from semkv_rag.cli.deep.result import FIX, Result
from semkv_rag.cli.output import in_words
from semkv_rag.engine import Completion, Engine

TOLERANCES = {"float32": 0.01, "float16": 0.15, "bfloat16": 0.5}
"""What log-probabilities may differ by, in nats. Kernels add up in another order in other batches."""

CUTS = (0.125, 0.4, 0.8)
"""Where plain vLLM's prefill is cut in two, to see how far it is from itself."""
TIMES_PLAIN = 2
"""A blend may differ from plain vLLM by so many times what plain vLLM differs from itself by."""


def check_equality(engine: Engine, about: Mapping[str, Any], prompt: Stored) -> Result:
    """Whether the ratio 1.0 gives plain vLLM's answer, within rounding.

    In 16 bits the rounding of many layers adds up, on some prompts to more than `TOLERANCES`. There it is
    measured how far plain vLLM is from itself.
    """
    case = in_words(len(prompt.tokens), "token")
    blend, alone = blended(engine, prompt, ratio=1.0), plain(engine, prompt.tokens)
    figures = {
        "largest_difference_nats": largest_difference(blend, alone),
        "reused_tokens": blend.report.reused_tokens,
    }
    if not figures["reused_tokens"]:
        message = f"nothing was reused: {blend.report.reason}"
        return Result("ratio 1.0", case, "fail", figures, message, FIX)
    most = TOLERANCES[about["dtype"]]
    if not figures["largest_difference_nats"] <= most:
        own = largest_difference_of_plain(engine, prompt, alone)
        figures["largest_difference_of_plain_nats"] = own
        most = max(most, TIMES_PLAIN * own)
    if not figures["largest_difference_nats"] <= most:
        message = "a blend that computes everything is not what plain vLLM answers"
        return Result("ratio 1.0", case, "fail", figures, message, FIX)
    return Result("ratio 1.0", case, "ok", figures)


def largest_difference_of_plain(engine: Engine, prompt: Stored, alone: Completion) -> float:
    """How far plain vLLM's answer is from its own with the prompt's prefill cut otherwise, nats.

    The first part of the prompt is computed alone, and found in vLLM's prefix cache; 0 where there is
    none.

    Args:
        alone: its answer to the whole prompt.
    """
    largest = 0.0
    for cut in CUTS:
        forget(engine)
        first = prompt.tokens[: int(cut * len(prompt.tokens))]
        plain(engine, first, max_tokens=1)
        in_parts = plain(engine, prompt.tokens, skip_reading_prefix_cache=False)
        largest = max(largest, largest_difference(in_parts, alone))
    forget(engine)
    return largest
