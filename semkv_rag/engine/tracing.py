"""A request's spans in OpenTelemetry, around vLLM's own.

`semkv.request` spans the whole request: vLLM's `llm_request` is its child, and so are the parts of reuse,
`semkv.match`, `semkv.load`, `semkv.pick` and `semkv.recompute`, with the times at which they began and
ended on the engine's side. Where vLLM traces nothing, nothing is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from semkv_rag.report import ReuseReport
from semkv_rag.wire import Times

TOLD: Final = (
    "exact_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "charged_ratio",
    "memory_bytes",
    "file_bytes",
    "object_bytes",
    "preemptions",
)
"""Fields of the report that are attributes, behind `semkv.`."""


class RequestTrace:
    """The span of one request; begins at once.

    Args:
        headers: of the trace that the request is part of, if its client has one.
        model: as it is called.
    """

    def __init__(self, headers: Mapping[str, str] | None, model: str) -> None:
        self._tracer = trace.get_tracer("semkv_rag")
        above = TraceContextTextMapPropagator().extract(headers or {})
        self._span = self._tracer.start_span(
            "semkv.request",
            context=above,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": model},
        )
        self._within = set_span_in_context(self._span)

    def headers(self) -> dict[str, str]:
        """Headers that make vLLM's span a child of this one."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._within)
        return carrier

    def end(self, report: ReuseReport | None, times: Times) -> None:
        """The request has ended.

        Args:
            report: None where it has none: it was aborted, or failed.
            times: when the parts of its reuse began and ended, seconds since the epoch.
        """
        for name, (began, ended) in times.items():
            span = self._tracer.start_span(
                f"semkv.{name}", context=self._within, start_time=round(began * 1e9)
            )
            span.end(end_time=round(ended * 1e9))
        if report is None:
            self._span.set_status(Status(StatusCode.ERROR, "the request did not end"))
        else:
            self._span.set_attributes(_attributes(report))
        self._span.end()


def _attributes(report: ReuseReport) -> dict[str, Any]:
    reused = report.exact_tokens + report.reused_tokens - report.recomputed_tokens
    told: dict[str, Any] = {
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": max(report.cached_tokens, reused),
        "semkv.outcome": report.kv_cache,
        "semkv.cached_tokens": report.cached_tokens,
        **{f"semkv.{name}": getattr(report, name) for name in TOLD},
    }
    optional = {
        "semkv.reason": report.reason,
        "semkv.selector": report.selector or None,
        "semkv.risk": report.risk,
        "semkv.served_by": report.served_by,
    }
    return told | {name: value for name, value in optional.items() if value is not None}
