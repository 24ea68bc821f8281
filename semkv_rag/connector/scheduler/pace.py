"""Whether loading pays: how long stored KV takes to load here, beside how long prompts take to compute.

This is the loading controller of CacheBlend (arXiv 2405.16444, section 5). It measures both times on the
engine's own last requests and steps, so they hold for its model, machine, storage and load. With
`ratio="auto"` a prompt is computed if its stored KV would take longer to load than all of its tokens take
to compute. A blend computes while it loads, so it loses nothing as long as loading takes less time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Final

from semkv_rag.config import AUTO
from semkv_rag.reuse import ReusePlan

REMEMBERED: Final = 16
"""Loads and steps that the estimates are medians of."""
LEAST_SEEN: Final = 4
"""Loads, and steps, that must be seen before anything is decided by them."""
LEAST_TOKENS: Final = 64
"""Tokens that a step or a load must have: the time of shorter ones is mostly what each takes anyway."""
TRIED_EVERY: Final = 16
"""One in so many prompts is loaded against the estimate: the storage may have become faster."""


class Pace:
    """Whether loading is faster than computing; one per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self._load_ms: deque[float] = deque(maxlen=REMEMBERED)  # a token
        self._prefill_ms: deque[float] = deque(maxlen=REMEMBERED)  # a token
        self._steps: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)  # begun, and its tokens
        self._refused = 0

    def step_began(self, tokens: int) -> None:
        """A step was handed to the workers.

        Args:
            tokens: that its forward computes.
        """
        if tokens:
            self._steps.append((time.perf_counter(), tokens))

    def step_ended(self) -> None:
        """The outcome of the oldest step with a forward is here.

        With asynchronous scheduling that is up to a step's length later than it ended, so prefill seems
        slower than it is, and loading is preferred for longer.
        """
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        if tokens >= LEAST_TOKENS:
            self._prefill_ms.append((time.perf_counter() - began) * 1000 / tokens)

    def loaded(self, tokens: int, took_ms: float) -> None:
        """A blend has loaded the stored KV of so many tokens."""
        if tokens >= LEAST_TOKENS and took_ms > 0:
            self._load_ms.append(took_ms / tokens)

    def why_not(self, plan: ReusePlan) -> str | None:
        """Why a plan's tokens had better be computed, in words; None where they had not."""
        seen = min(len(self._load_ms), len(self._prefill_ms))
        if plan.options.ratio != AUTO or seen < LEAST_SEEN:
            return None
        stored = plan.exact_tokens + plan.reused_tokens
        load_ms = stored * statistics.median(self._load_ms)
        prefill_ms = plan.covered * statistics.median(self._prefill_ms)
        if load_ms <= prefill_ms:
            self._refused = 0
            return None
        self._refused += 1
        if self._refused % TRIED_EVERY == 0:
            return None
        return (
            f"plain prefill is sooner: about {prefill_ms:.0f} ms, and {load_ms:.0f} ms to load the"
            " stored KV"
        )
