"""What an engine answers."""

from __future__ import annotations

from dataclasses import dataclass

from semkv_rag.report import ReuseReport


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, or in a stream the part of it that is new.

    Attributes:
        text: the generated text.
        token_ids: its tokens.
        logprobs: for each token, log-probabilities by token id; None when none were asked for.
        finish_reason: `stop`, `length` or `abort`; None in all parts of a stream but the last.
        prompt_tokens: tokens of the prompt.
        report: what was reused; complete in the last part of a stream.
        ttft_ms: from handing in the request to its first token.
        latency_ms: from handing in the request to this part.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None
    finish_reason: str | None
    prompt_tokens: int
    report: ReuseReport
    ttft_ms: float
    latency_ms: float


def join(parts: list[Completion]) -> Completion:
    """The whole answer of a stream's parts, at least one."""
    last = parts[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(entry for part in parts for entry in part.logprobs or ())
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        report=last.report,
        ttft_ms=last.ttft_ms,
        latency_ms=last.latency_ms,
    )
