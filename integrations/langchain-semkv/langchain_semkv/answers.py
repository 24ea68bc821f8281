"""What a backend's answer says beside its text, in LangChain's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from semkv_rag.llm import Part

PROVIDER = "semkv"
REPORT_KEY = "semkv"


def usage(part: Part) -> UsageMetadata | None:
    """The tokens of a whole answer; None for parts of a stream before the last."""
    counts = (part.raw or {}).get("usage")
    if counts is None:
        return None
    prompt, answer = counts["prompt_tokens"], counts.get("completion_tokens") or 0
    metadata = UsageMetadata(
        input_tokens=prompt, output_tokens=answer, total_tokens=prompt + answer
    )
    if (read := _tokens_read(part.report, counts)) is not None:
        read = min(read, prompt)
        metadata["input_token_details"] = InputTokenDetails(
            cache_read=read, cache_creation=prompt - read
        )
    return metadata


def _tokens_read(report: Mapping[str, Any] | None, counts: Mapping[str, Any]) -> int | None:
    """Prompt tokens whose KV was not computed: found in vLLM's prefix cache or taken from the store."""
    if report is not None:
        reused = report["exact_tokens"] + report["reused_tokens"] - report["recomputed_tokens"]
        return int(report["cached_tokens"] + reused)
    # A server that is not `semkv serve` tells at most of its prefix cache.
    details = counts.get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def metadata(part: Part) -> dict[str, Any]:
    """The `response_metadata` of a whole answer; empty for parts of a stream before the last."""
    if part.raw is None:
        return {} if part.logprobs is None else {"logprobs": part.logprobs}
    known = {
        "model_name": part.raw.get("model"),
        "model_provider": PROVIDER,
        "finish_reason": part.raw.get("finish_reason"),
        "id": part.raw.get("id"),
        "ttft_ms": part.raw.get("ttft_ms"),
        "latency_ms": part.raw.get("latency_ms"),
        "logprobs": part.logprobs,
        REPORT_KEY: None if part.report is None else dict(part.report),
    }
    return {name: value for name, value in known.items() if value is not None}
