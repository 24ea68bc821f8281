"""What to set, by what was measured, and what that can't tell."""

from __future__ import annotations

from collections.abc import Sequence

from semkv_rag.quality.result import Full, Line, Recommendation
from semkv_rag.quality.settings import AS_STORED, EXACT

TARGET = 0.98
"""The share of equal tokens that is close enough to full prefill, unless somebody says otherwise."""
LOST_F1 = 0.01
"""How much of the full prefill's F1 may be lost."""
PREFERRED = 0.05
"""How much more a preset may be charged than the cheapest setting and still be preferred to it."""
FEW = 50
"""Fewer questions than these are said to be few."""
KNOWS_LITTLE = 0.2
_CONTROLS = ("all",)


def recommend(lines: Sequence[Line], full: Full, target: float = TARGET) -> Recommendation:
    """The cheapest setting that is close enough to full prefill; a preset where one is nearly as cheap.

    Close enough: `target` of the tokens are the same, no more than `LOST_F1` of F1 is lost where answers
    are known, and it is charged less than full prefill. `exact` when none is.

    Args:
        lines: one of them of the preset `exact`.
    """
    tried = [one for one in lines if one.name != EXACT and one.selector not in _CONTROLS]
    good = [one for one in tried if _close(one, full, target) and one.charged_ratio < 1]
    (exact,) = [one for one in lines if one.name == EXACT]
    if not good:
        reason = f"No setting comes close enough: {_wanted(full, target)}."
        if tried:
            nearest = max(tried, key=lambda one: (one.agreement.mean, -one.charged_ratio))
            reason += f" The nearest, {_named(nearest)}, has {_result_of(nearest, full)}."
        return _recommended(exact, reason)
    cheapest = min(good, key=lambda one: (one.charged_ratio, -one.agreement.mean))
    presets = [one for one in good if one.preset]
    near = [one for one in presets if one.charged_ratio <= cheapest.charged_ratio + PREFERRED]
    chosen = min(near, key=lambda one: one.charged_ratio, default=cheapest)
    what = f"{chosen.selector} at {100 * chosen.recomputed:.0f} %" if chosen.preset else "It"
    reason = f"{what} has {_result_of(chosen, full)}. "
    if chosen is cheapest:
        reason += f"Nothing cheaper that was tried is close enough: {_wanted(full, target)}."
    else:
        reason += f"Only {_named(cheapest)} is cheaper and close enough, by little."
    if chosen.agreement.low < target:
        reason += " The interval reaches below that: more questions would tell."
    return _recommended(chosen, reason)


def unknown(
    lines: Sequence[Line], full: Full, *, max_tokens: int, found_here: bool
) -> tuple[str, ...]:
    """What the measurement can't tell, in words.

    Args:
        found_here: whether passages were looked for here and not by the caller's own retriever.
    """
    said = []
    if full.questions < FEW:
        widest = max((one.agreement.high - one.agreement.low) / 2 for one in lines)
        said.append(
            f"{full.questions} questions are few: agreement is known to ±{100 * widest:.1f} points at "
            "worst."
        )
    if full.f1 is None:
        said.append(
            "No answers are known: being as full prefill says nothing of being right, and a model with "
            "random weights agrees and disagrees as well as any."
        )
    elif full.f1 < KNOWS_LITTLE:
        said.append(
            f"Full prefill itself has an F1 of {100 * full.f1:.0f}: how a model loses answers that it "
            "does not know says little of one that knows them. Look at the prompt's form first."
        )
    (exact,) = [one for one in lines if one.name == EXACT]
    if exact.answers_equal.mean < 1:
        said.append(
            f"Full prefill is not quite as itself ({100 * exact.agreement.mean:.1f} % of tokens): "
            "numbers of this dtype depend on what is computed together. No setting can do better but "
            "by chance."
        )
    if full.cut:
        said.append(
            f"{full.cut} of {full.questions} answers were cut at {max_tokens} tokens: what differs later "
            "was not seen."
        )
    if found_here:
        said.append(
            "The passages were found by the questions' words, not by your retriever: give prompts or "
            "ctxs to measure what it finds."
        )
    said += [
        "One store was measured: other sizes of chunks, another prompt prefix, or chunks computed behind "
        "others have other losses.",
        "The charged ratio counts tokens and layers, not time. Times to first token are medians of "
        "requests one at a time, with an empty prefix cache, on this machine.",
        "Decoding was greedy. The KL is a lower bound from the likeliest tokens of each place.",
    ]
    return tuple(said)


def _close(line: Line, full: Full, target: float) -> bool:
    lost = 0.0 if line.f1 is None or full.f1 is None else full.f1 - line.f1
    return line.agreement.mean >= target and lost <= LOST_F1


def _wanted(full: Full, target: float) -> str:
    wanted = f"{100 * target:g} % equal tokens"
    if full.f1 is not None:
        wanted += f" and an F1 of at least {100 * (full.f1 - LOST_F1):.1f}"
    return f"{wanted} for less than full prefill"


def _named(line: Line) -> str:
    if line.name == AS_STORED:
        return "the stored KV as it is (selector none)"
    if line.preset:
        return f"{line.name} ({line.selector} at {100 * line.recomputed:.0f} %)"
    return line.name


def _result_of(line: Line, full: Full) -> str:
    agreed = line.agreement
    text = (
        f"{100 * agreed.mean:.1f} % [{100 * agreed.low:.1f}, {100 * agreed.high:.1f}] equal tokens and "
        f"{100 * line.answers_equal.mean:.0f} % whole answers, at {100 * line.charged_ratio:.0f} % of "
        "full prefill"
    )
    if line.f1 is not None and full.f1 is not None:
        text += f", with an F1 of {100 * line.f1:.1f} beside {100 * full.f1:.1f}"
    return text


def _recommended(line: Line, reason: str) -> Recommendation:
    preset = line.name if line.preset else None
    return Recommendation(preset, line.selector, line.ratio, line.check_layer, reason)
