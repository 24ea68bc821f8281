"""What a measurement found: plain values, ready for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from semkv_rag.quality.comparing import Agreement
from semkv_rag.quality.estimate import Estimate, estimate, share
from semkv_rag.quality.settings import Setting


@dataclass(frozen=True, slots=True)
class Answered:
    """One question, answered.

    Attributes:
        question: its name.
        text: the answer.
        ttft_ms: time to its first token, with nothing in vLLM's prefix cache.
        exact_match, f1: against the known answers; None when there are none.
        cut: it was not finished within the tokens it was given.
    """

    question: str
    text: str
    ttft_ms: float
    exact_match: float | None
    f1: float | None
    cut: bool


@dataclass(frozen=True, slots=True)
class Sample(Answered):
    """One question, answered out of reused KV, beside its answer by full prefill.

    Attributes:
        reused_tokens, recomputed_tokens, charged_ratio: of the request's reuse report.
    """

    agreement: Agreement
    reused_tokens: int
    recomputed_tokens: int
    charged_ratio: float


@dataclass(frozen=True, slots=True)
class Line:
    """A setting, over all questions that were compared.

    Attributes:
        name: of the setting.
        preset: whether it is one.
        selector, ratio, check_layer: what it stands for.
        questions: how many were compared.
        agreement: of the full prefill's tokens, the share that is the likeliest here too, behind the
            same tokens.
        answers_equal: the share of questions whose whole answer is the same, token by token.
        first_difference: the median place of the first other token, of the answers that have one.
        kl, first_kl: nats a token, a lower bound (`divergence`); of the answers' first places alone.
        recomputed: recomputed of reused tokens.
        charged_ratio: what is computed to blend, as a share of the full prefill of what is blended.
        ttft_ms: the median.
        exact_match, f1: of the questions with known answers; None without any.
    """

    name: str
    preset: bool
    selector: str
    ratio: float
    check_layer: int
    questions: int
    agreement: Estimate
    answers_equal: Estimate
    first_difference: float | None
    kl: Estimate
    first_kl: float
    recomputed: float
    charged_ratio: float
    ttft_ms: float
    exact_match: float | None
    f1: float | None


@dataclass(frozen=True, slots=True)
class Full:
    """The answers by full prefill to the questions that were compared; fields as in `Line`.

    Attributes:
        cut: answers that were not finished within the tokens they were given.
        known: questions with known answers.
        tokens: of all answers together.
    """

    questions: int
    tokens: int
    cut: int
    known: int
    ttft_ms: float
    exact_match: float | None
    f1: float | None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to set, and why.

    Attributes:
        preset: its name, or None when no preset but a selector and a ratio is recommended.
        selector, ratio, check_layer: what that is.
        reason: in words.
    """

    preset: str | None
    selector: str
    ratio: float
    check_layer: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A question that was not compared, by its name, and why."""

    question: str
    reason: str


@dataclass(frozen=True, slots=True)
class QualityResult:
    """What `measure` found.

    Attributes:
        model, lora, namespace: whose chunks; `lora` is an adapter's name, or None.
        max_tokens: of an answer.
        full: by full prefill; None when nothing was compared.
        lines: one for each setting.
        not_reused: questions in whose prompts nothing was reused.
        exact_only: questions whose prompts had nothing but exact spans, which are as full prefill.
        failed: questions that could not be asked, or not with every setting.
        recommendation: None when nothing was compared.
        unknown: what this can't tell, in words.
        full_answers, samples: question by question; `samples` by the setting's name.
        interrupted: Ctrl-C ended it before all questions were asked.
    """

    model: str
    lora: str | None
    namespace: str
    max_tokens: int
    full: Full | None
    lines: tuple[Line, ...]
    not_reused: tuple[LeftOut, ...]
    exact_only: tuple[LeftOut, ...]
    failed: tuple[LeftOut, ...]
    recommendation: Recommendation | None
    unknown: tuple[str, ...]
    full_answers: tuple[Answered, ...]
    samples: dict[str, tuple[Sample, ...]]
    interrupted: bool = False

    def to_mapping(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)


def summary(setting: Setting, preset: bool, samples: Sequence[Sample]) -> Line:
    """A setting's line; at least one sample."""
    compared = [sample.agreement for sample in samples]
    parted = [one.first_difference for one in compared if one.first_difference is not None]
    places = [one.places for one in compared]
    reused = sum(sample.reused_tokens for sample in samples)
    return Line(
        name=setting.name,
        preset=preset,
        selector=setting.options.selector,
        ratio=setting.ratio,
        check_layer=setting.options.check_layer,
        questions=len(samples),
        agreement=share([one.equal for one in compared], places),
        answers_equal=share([float(one.first_difference is None) for one in compared]),
        first_difference=statistics.median(parted) if parted else None,
        kl=estimate([one.kl for one in compared], places),
        first_kl=statistics.fmean(one.first_kl for one in compared),
        recomputed=sum(sample.recomputed_tokens for sample in samples) / max(reused, 1),
        charged_ratio=statistics.fmean(sample.charged_ratio for sample in samples),
        ttft_ms=statistics.median(sample.ttft_ms for sample in samples),
        exact_match=_mean([sample.exact_match for sample in samples]),
        f1=_mean([sample.f1 for sample in samples]),
    )


def full_summary(answers: Sequence[Answered], tokens: int) -> Full:
    """The line of full prefill; at least one answer."""
    return Full(
        questions=len(answers),
        tokens=tokens,
        cut=sum(answer.cut for answer in answers),
        known=sum(answer.f1 is not None for answer in answers),
        ttft_ms=statistics.median(answer.ttft_ms for answer in answers),
        exact_match=_mean([answer.exact_match for answer in answers]),
        f1=_mean([answer.f1 for answer in answers]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
