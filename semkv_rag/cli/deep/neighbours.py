"""A request beside a long prompt: how long it stands still, and that its answer is its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from semkv_rag.cli.deep.equality import TOLERANCES
from semkv_rag.cli.deep.prompts import (
    ALONE,
    GREEDY,
    Stored,
    another_question,
    blended,
    forget,
    largest_difference,
    plain,
    random_tokens,
)
from semkv_rag.cli.deep.result import FIX, Result
from semkv_rag.cli.output import in_words
from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.completion import join

PROMPT = 32
BEFORE = 12
"""Tokens of the neighbour before the long prompt comes."""
BEHIND = 4
"""And when it is answered."""
COMPARED = 32
MOST = 1024
NUMBER = 1000
"""The number of the question that is blended: no question before had it."""


def check_neighbours(engine: Engine, about: Mapping[str, Any], prompt: Stored) -> list[Result]:
    """Beside plain prefill and beside a blend of the same prompt."""
    case, tokens = in_words(len(prompt.tokens), "token"), random_tokens(engine, 7, PROMPT)
    alone = plain(engine, tokens, max_tokens=COMPARED)
    usual_ms, plain_ms, _ = _beside(
        engine, tokens, lambda: plain(engine, prompt.tokens, max_tokens=1)
    )
    forget(engine)
    asked = another_question(engine, prompt, NUMBER)
    _, blend_ms, answer = _beside(engine, tokens, lambda: blended(engine, asked, max_tokens=1))
    stall = {"usual_ms": usual_ms, "plain_ms": plain_ms, "blend_ms": blend_ms}
    figures = {"largest_difference_nats": largest_difference(alone, answer)}
    if figures["largest_difference_nats"] <= TOLERANCES[about["dtype"]]:
        unchanged = Result("neighbours", case, "ok", figures)
    else:
        message = "beside a blend a request was answered otherwise than alone"
        unchanged = Result("neighbours", case, "fail", figures, message, FIX)
    return [Result("stall", case, "ok", stall), unchanged]


def _beside(
    engine: Engine, tokens: list[int], ask: Callable[[], Completion]
) -> tuple[float, float, Completion]:
    """A request's usual time between tokens and its longest beside another one, in ms; its answer."""
    room = min(MOST, engine.max_model_len - len(tokens))
    sampling = {**GREEDY, **ALONE, "max_tokens": room}
    parts, gaps = [], []
    other, left = None, BEHIND
    with ThreadPoolExecutor(1) as pool:
        stream = engine.stream(tokens, sampling=sampling, reuse=ReuseOptions(enabled=False))
        last = time.perf_counter()
        for part in stream:
            now = time.perf_counter()
            parts.append(part)
            gaps.append((now - last) * 1000)
            last = now
            if other is None and len(parts) == BEFORE:
                other = pool.submit(ask)
            elif other is not None and other.done():
                left -= 1
                if not left:
                    break
        stream.close()  # type: ignore[attr-defined]
        if other is not None:
            other.result()
    return statistics.median(gaps[1:BEFORE]), max(gaps[BEFORE:], default=0.0), join(parts)
