"""The last requests of each namespace, for whoever looks at them in the console. In memory alone."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from semkv_rag.report import ReuseReport
from semkv_rag.reuse import TokenArray

KEPT: Final = 50
"""Requests of a namespace."""
NAMESPACES: Final = 200
"""The ones asked last."""
MOST_TOKENS: Final = 4 << 20
"""Tokens of all prompts that are kept, together."""


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request that was answered.

    Attributes:
        number: by which it is asked for.
        ended_at: seconds since the epoch.
        report: with a token map that has no texts yet.
        tokens: of its prompt, [tokens].
    """

    number: int
    ended_at: float
    report: ReuseReport
    ttft_ms: float
    latency_ms: float
    tokens: TokenArray


@dataclass
class RecentRequests:
    """Kept by namespace; used in the loop of the engine's client."""

    _by_namespace: OrderedDict[str, deque[SeenRequest]] = field(default_factory=OrderedDict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _tokens: int = 0

    def note(
        self,
        namespace: str,
        report: ReuseReport,
        tokens: list[int],
        ttft_ms: float,
        latency_ms: float,
    ) -> None:
        """A request has ended."""
        kept = self._by_namespace.setdefault(namespace, deque())
        self._by_namespace.move_to_end(namespace)
        own = np.array(tokens, dtype=np.int32)
        number = next(self._numbers)
        kept.append(SeenRequest(number, time.time(), report, ttft_ms, latency_ms, own))
        self._tokens += len(own)
        if len(kept) > KEPT:
            self._drop(kept)
        while len(self._by_namespace) > NAMESPACES or self._tokens > MOST_TOKENS:
            oldest, others = next(iter(self._by_namespace.items()))
            self._drop(others)
            if not others:
                del self._by_namespace[oldest]

    def of(self, namespace: str) -> list[SeenRequest]:
        """A namespace's, the last one first."""
        return list(self._by_namespace.get(namespace, ()))[::-1]

    def get(self, namespace: str, number: int) -> SeenRequest | None:
        """One of a namespace's, if it is still kept."""
        return next((one for one in self.of(namespace) if one.number == number), None)

    def _drop(self, kept: deque[SeenRequest]) -> None:
        self._tokens -= len(kept.popleft().tokens)
