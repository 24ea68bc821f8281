"""The outcome of a request: its report, and the parts that are told of it.

A fault in one of these parts is logged. The answer goes to its client all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm import RequestOutput

from semkv_rag.engine.looked_up import LookedUp
from semkv_rag.engine.recent import RecentRequests
from semkv_rag.engine.totals import Totals
from semkv_rag.engine.tracing import RequestTrace
from semkv_rag.report import ReuseReport
from semkv_rag.wire import CAPTURED_KEY, COUNTED_KEY, PARAMS_KEY, TIMES_KEY, Times

logger = logging.getLogger(__name__)


@contextmanager
def looking_on() -> Iterator[None]:
    """Inside, an error is logged and goes no further: no answer depends on what is done there."""
    try:
        yield
    except Exception:
        logger.exception("A request could not be counted, kept or shown")


def plain_params(output: RequestOutput, reason: str) -> dict[str, Any]:
    """An answer's `kv_transfer_params` where our connector does not run; another one's stay in them.

    Args:
        output: the last one of its answer.
        reason: in words, why it does not run.
    """
    report = ReuseReport(
        kv_cache="skip",
        prompt_tokens=len(output.prompt_token_ids or ()),
        cached_tokens=output.num_cached_tokens or 0,
        reason=reason,
    )
    return {**(output.kv_transfer_params or {}), PARAMS_KEY: report.to_mapping()}


class Outcome:
    """What becomes of one request, kept from its beginning on.

    Args:
        totals: count it; None for a capture, which is nobody's request.
        recent: keeps it, or None.
        trace: its span, or None.

    Attributes:
        looked_up: what the prompt cache made of its prompt, once that is known.
        report: once it has ended.
        captured: whether its prompt was captured.
    """

    def __init__(
        self,
        namespace: str,
        totals: Totals | None,
        recent: RecentRequests | None,
        trace: RequestTrace | None,
    ) -> None:
        self._namespace, self._totals, self._recent, self._trace = namespace, totals, recent, trace
        self._began = time.perf_counter()
        self._ttft_s: float | None = None
        self._times: Times = {}
        self.looked_up: LookedUp | None = None
        self.report: ReuseReport | None = None
        self.captured = False

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def take(self, output: RequestOutput) -> None:
        """A part of its answer has come; takes out of the last one what is the engine's own."""
        if self._ttft_s is None:
            self._ttft_s = self.seconds
        params = output.kv_transfer_params
        if params is None:
            return
        self.captured = params.pop(CAPTURED_KEY, False)
        self._times = params.pop(TIMES_KEY, {})
        counts: Mapping[str, Any] | None = params.pop(COUNTED_KEY, None)
        if PARAMS_KEY not in params:
            return
        report = ReuseReport.from_mapping(params[PARAMS_KEY])
        if self.looked_up is not None:
            report = self.looked_up.with_outcome(report)
            params[PARAMS_KEY] = report.to_mapping()
        self.report = report
        with looking_on():
            self._tell(report, counts, output)

    def _tell(
        self, report: ReuseReport, counts: Mapping[str, Any] | None, output: RequestOutput
    ) -> None:
        if self._totals is not None and counts is not None:
            self._totals.count(report, **counts)
        if self._recent is not None:
            tokens = list(output.prompt_token_ids or ())
            ttft_ms, latency_ms = 1000 * (self._ttft_s or 0.0), 1000 * self.seconds
            self._recent.note(self._namespace, report, tokens, ttft_ms, latency_ms)

    def end(self) -> None:
        """It has ended, in whatever way."""
        if self._trace is not None:
            with looking_on():
                self._trace.end(self.report, self._times)
