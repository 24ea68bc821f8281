"""The reuse plan: which tokens of a prompt take their KV from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from semkv_rag.config import AUTO, ReuseOptions
from semkv_rag.reuse.question import Question, find_question
from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.selectors import selector_type


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `src` to `src + length` of a chunk stand at `dst` of the prompt.

    `base` is the position chunk token 0 had when its KV was computed (the length of its context),
    so its keys are moved by `dst - (base + src)`. An exact span has the stored left context in the
    prompt too, and a lossless codec: its KV is right as it is.
    """

    chunk_id: str
    src: int
    dst: int
    length: int
    base: int = 0
    exact: bool = False
    codec: str = "plain"

    @property
    def end(self) -> int:
        """The prompt position behind the span's last token."""
        return self.dst + self.length

    @property
    def shift(self) -> int:
        """The number of positions that the stored keys move by."""
        return self.dst - self.base - self.src


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The spans of one request and how they are blended.

    Attributes:
        spans: in prompt order, none overlapping another.
        covered: the prompt's first `covered` tokens get their KV from the blend pass; vLLM computes
            the rest. Always less than the prompt's length: the last token's logits are needed.
        options: ratio, selector and check layer.
        question: what the selector asks with, see `asking`; None when it picks without.
    """

    spans: tuple[Span, ...]
    covered: int
    options: ReuseOptions
    question: Question | None = None

    def asking(self, prompt: Sequence[int] | TokenArray) -> ReusePlan:
        """This plan with the question of its prompt, if its selector looks at one.

        Args:
            prompt: all of its tokens.
        """
        asks = selector_type(self.options.selector).needs_question
        if not asks or not 0 < self.options.ratio_of(self.reused_tokens) < 1:
            return self
        question = find_question(prompt, self.covered, self.options.question_tokens)
        return replace(self, question=question) if question.tokens else self

    @property
    def recomputes_all(self) -> bool:
        """Whether every reused token is computed again: by its selector, or at ratio 1."""
        return self.options.ratio_of(self.reused_tokens) == 1

    @property
    def first_inexact(self) -> int | None:
        """The first token whose KV differs from plain prefill's, or None when none does.

        Tokens between spans are computed, so they are exact for as long as all before them are.
        """
        if self.recomputes_all:
            return None
        return next((span.dst for span in self.spans if not span.exact), None)

    @property
    def is_exact_prompt_prefix(self) -> bool:
        """Whether exact spans, one behind the other from the first token on, are all there is."""
        ends = [0, *(span.end for span in self.spans)]
        return all(
            span.exact and span.dst == end for span, end in zip(self.spans, ends, strict=False)
        )

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs of the reused chunks, each once."""
        return tuple(dict.fromkeys(span.codec for span in self.spans))

    @property
    def exact_tokens(self) -> int:
        return sum(span.length for span in self.spans if span.exact)

    @property
    def reused_tokens(self) -> int:
        """Tokens that are reused behind another context."""
        return sum(span.length for span in self.spans if not span.exact)

    def digest(self) -> bytes:
        """32 bytes that two plans share only when they give the same KV for the same prompt."""
        options = self.options
        parts = (
            options.ratio, options.promise if options.ratio == AUTO else None, options.least_tokens,
            options.selector, options.check_layer, options.namespace, self.covered,
            *((s.chunk_id, s.src, s.dst, s.length, s.exact, s.codec) for s in self.spans), self.question,
        )  # fmt: skip
        return blake3(repr(parts).encode()).digest()


def make_plan(
    spans: Sequence[Span], prompt_tokens: int, options: ReuseOptions, end: int | None = None
) -> ReusePlan | None:
    """The plan that reuses `spans` in a prompt, or None when it would reuse nothing.

    Args:
        spans: as `ChunkIndex.match` returns them: in prompt order, not overlapping.
        prompt_tokens: tokens of the whole prompt. Its last one is always left to vLLM.
        options: the request's options.
        end: nothing is reused from this token on.
    """
    limit = prompt_tokens - 1 if end is None else min(end, prompt_tokens - 1)
    kept: list[Span] = []
    for span in spans:
        length = min(span.length, limit - span.dst)
        if length > 0:
            kept.append(replace(span, length=length))
    if not kept:
        return None
    return ReusePlan(spans=tuple(kept), covered=kept[-1].end, options=options)
