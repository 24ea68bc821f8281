"""The token map of a plan: positions, and no texts."""

from __future__ import annotations

from collections.abc import Sequence

from semkv_rag.reuse.plan import ReusePlan, Span
from semkv_rag.token_map import MappedSpan, TokenMap


def token_map(
    plan: ReusePlan | None,
    cached_tokens: int = 0,
    recomputed: Sequence[tuple[int, int]] = (),
    scores: str = "",
    start: int = 0,
) -> TokenMap:
    """What became of a prompt's tokens.

    Args:
        plan: None where nothing was reused.
        cached_tokens: the prompt's first ones, which vLLM's prefix cache had.
        recomputed: positions that were computed again, [begin, end) of each run.
        scores: how much the selector wanted each token computed, from `start` on: a digit, or a space
            where it was not asked.
    """

    def mapped(span: Span) -> MappedSpan:
        cut = [(max(begin, span.dst), min(end, span.end)) for begin, end in recomputed]
        own = scores[span.dst - start : span.end - start] if span.dst >= start else ""
        return MappedSpan(
            begin=span.dst,
            end=span.end,
            exact=span.exact,
            chunk_id=span.chunk_id,
            recomputed=() if span.exact else tuple((a, b) for a, b in cut if a < b),
            scores=own if own.isdigit() else "",
            context_tokens=span.base,
        )

    spans = plan.spans if plan is not None else ()
    return TokenMap((), cached_tokens, tuple(map(mapped, spans)))
