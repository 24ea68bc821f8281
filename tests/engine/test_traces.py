"""A request's spans reach a collector, in one trace with vLLM's own and with its client's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.answers import SAMPLING
from workbench.chunks import Stored, random_tokens, store_chunks
from workbench.engines import Engines

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self) -> dict[str, Span]:
        """What came since the last call, of requests, by name."""
        trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
        spans = {one.name: one for one in self.spans if one.name.startswith(("semkv", "llm"))}
        self.spans.clear()
        return spans

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(engines: Engines, reader: Path, collector: Collector) -> Iterator[Engine]:
    with engines.own(reader, otlp_traces_endpoint=collector.endpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def chunks(traced: Engine, collector: Collector) -> list[Stored]:
    stored = store_chunks(traced, [random_tokens(seed, 90) for seed in (1, 2)], namespace="default")
    collector.take()
    return stored


def told(span: Span) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


@pytest.mark.engine
def test_the_parts_of_a_blend(traced: Engine, chunks: list[Stored], collector: Collector) -> None:
    prompt = random_tokens(3, 5) + chunks[1].tokens + chunks[0].tokens + random_tokens(4, 6)
    report = traced.generate(prompt, sampling=SAMPLING, reuse=ReuseOptions(ratio=0.3)).report
    spans = collector.take()
    assert spans.keys() == {
        *("semkv.request", "llm_request"),
        *("semkv.match", "semkv.load", "semkv.pick", "semkv.recompute"),
    }
    whole = spans.pop("semkv.request")
    for span in spans.values():
        assert span.trace_id == whole.trace_id
        assert span.parent_span_id == whole.span_id
    for name in ("match", "load", "pick", "recompute"):
        span = spans[f"semkv.{name}"]
        assert whole.start_time_unix_nano < span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano < whole.end_time_unix_nano
    assert spans["semkv.pick"].end_time_unix_nano == spans["semkv.recompute"].start_time_unix_nano
    took_ms = (
        spans["semkv.load"].end_time_unix_nano - spans["semkv.load"].start_time_unix_nano
    ) / 1e6
    assert abs(took_ms - report.load_ms) < 1
    said = told(whole)
    assert said["semkv.outcome"] == "hit"
    assert said["semkv.recomputed_tokens"] == report.recomputed_tokens > 0
    assert said["gen_ai.usage.input_tokens"] == len(prompt)
    assert said["gen_ai.usage.cache_read.input_tokens"] == (
        report.exact_tokens + report.reused_tokens - report.recomputed_tokens
    )


@pytest.mark.engine
def test_a_miss_and_its_reason(traced: Engine, collector: Collector) -> None:
    traced.generate(random_tokens(5, 40), sampling=SAMPLING)
    spans = collector.take()
    assert spans.keys() == {"semkv.request", "llm_request", "semkv.match"}
    said = told(spans["semkv.request"])
    assert said["semkv.outcome"] == "miss"
    assert said["semkv.reason"] == "no stored chunk was found in the prompt"


@pytest.mark.engine
def test_the_client_s_trace_goes_on(traced: Engine, collector: Collector) -> None:
    async def ask() -> None:
        from semkv_rag.engine.asking import sampling_params

        assert traced._llm is not None
        params = sampling_params(SAMPLING, ReuseOptions())
        prompt = await traced._llm.render({"prompt_token_ids": random_tokens(6, 20)})
        headers = {"traceparent": PARENT}
        async for _ in traced._llm.generate(prompt, params, "theirs", trace_headers=headers):
            pass

    traced._loop.call(ask())
    whole = collector.take()["semkv.request"]
    assert whole.trace_id.hex() == PARENT.split("-")[1]
    assert whole.parent_span_id.hex() == PARENT.split("-")[2]
