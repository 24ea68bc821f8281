"""Asking an engine and comparing what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.lora.request import LoRARequest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine

SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "logprobs": 5, "ignore_eos": True}


def plain(
    engine: Engine, prompt: Sequence[int], lora: LoRARequest | None = None, /, **sampling: Any
) -> Completion:
    """The answer of plain vLLM: no reuse, and every prompt token computed."""
    options = {**SAMPLING, "skip_reading_prefix_cache": True, **sampling}
    reuse = ReuseOptions(enabled=False)
    return engine.generate(prompt, sampling=options, reuse=reuse, lora_request=lora)


def blended(
    engine: Engine, prompt: Sequence[int], lora: LoRARequest | None = None, /, **options: Any
) -> Completion:
    """The answer with reuse, under these `ReuseOptions`."""
    reuse = ReuseOptions(**options)
    return engine.generate(prompt, sampling=SAMPLING, reuse=reuse, lora_request=lora)


def counted(engine: Engine, metric: str, label: str) -> float:
    """What the engine has counted so far under a metric's label."""
    return float(engine.stats().get(metric, {}).get(label, 0))


def largest_difference(a: Completion, b: Completion) -> float:
    """The largest difference of log-probabilities that both answers tell of the same tokens.

    Position by position, for as long as both went the same way.
    """
    assert a.logprobs is not None and b.logprobs is not None
    largest = 0.0
    for position, (one, other) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        if a.token_ids[:position] != b.token_ids[:position]:
            break
        common = one.keys() & other.keys()
        assert common, f"the answers share no likely token at {position}"
        largest = max(largest, *(abs(one[token] - other[token]) for token in common))
    return largest


def assert_same(a: Completion, b: Completion, tolerance: float = 1e-4) -> None:
    """The same tokens, and the same log-probabilities within `tolerance`."""
    assert a.token_ids == b.token_ids
    assert largest_difference(a, b) <= tolerance
