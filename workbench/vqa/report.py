"""What the VQA benchmark says: a line for each question, a table for each pass, the figures, plots."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from semkv_rag.report import ReuseReport, log_line
from workbench.figures import summary
from workbench.vqa.data import Sample
from workbench.vqa.passes import Facts, Row

VISION = "embedding:vision"


@dataclass(frozen=True)
class Agreement:
    """An answer beside plain vLLM's to the same question.

    Attributes:
        same: whether it has the same tokens.
        difference: the largest of the log-probabilities both tell of the same token, for as long as
            both answers went the same way.
    """

    same: bool
    difference: float


def agreement(reference: Row, row: Row) -> Agreement:
    """How a row's answer stands to the uncached one."""
    largest = 0.0
    pairs = zip(reference.logprobs, row.logprobs, strict=False)
    for position, (one, other) in enumerate(pairs):
        if reference.tokens[:position] != row.tokens[:position]:
            break
        common = one.keys() & other.keys()
        largest = max([largest, *(abs(one[token] - other[token]) for token in common)])
    return Agreement(reference.tokens == row.tokens, largest)


def is_true(text: str, truth: str) -> bool:
    """Whether an answer is the right one, case, punctuation and white space left aside, as in GQA."""
    return _bare(text) == _bare(truth)


def _bare(text: str) -> str:
    kept = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return " ".join(kept.split())


def line(sample: Sample, row: Row, reference: Row | None) -> str:
    """One question in one line: the request's own line, and what became of its answer.

    `answer match` is that with plain vLLM's uncached answer, token by token; `ground truth match` that
    with the right answer, where it is told.

    Args:
        reference: plain vLLM's row; None where this is plain vLLM.
    """
    if reference is None:
        parts = [f"[{row.id}] plain vLLM | latency={row.latency_s:.3f}s"]
    else:
        report = ReuseReport.from_mapping(row.report)
        parts = [log_line(row.id, report, latency_s=row.latency_s)]
    parts.append(f"tower_calls={row.tower_calls}")
    if reference is not None:
        parts.append(f"answer match={_yes(agreement(reference, row).same)}")
    if sample.truth is not None:
        parts.append(f"ground truth match={_yes(is_true(row.text, sample.truth))}")
    return " | ".join(parts)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ---- figures -------------------------------------------------------------------------------------


def figures_of(
    samples: Sequence[Sample], rows: Sequence[Row], references: Sequence[Row] | None, facts: Facts
) -> dict[str, Any]:
    """A pass's figures: of all its requests, and of those each tier hit.

    Args:
        references: plain vLLM's rows; None where these are they.
    """
    pairs = None if references is None else list(zip(references, rows, strict=True))
    tiers: dict[str, Any] = {}
    for tier in dict.fromkeys(tier for row in rows for tier in statuses(row)):
        told = [statuses(row).get(tier, "skip") for row in rows]
        chosen = [place for place, status in enumerate(told) if status == "hit"]
        tiers[tier] = {
            **{status: told.count(status) for status in ("hit", "miss", "skip")},
            "of_its_hits": _group(rows, pairs, chosen),
        }
    missed = [place for place, row in enumerate(rows) if "hit" not in statuses(row).values()]
    every = list(range(len(rows)))
    known = [(sample.truth, row) for sample, row in zip(samples, rows, strict=True) if sample.truth]
    return {
        **_group(rows, pairs, every),
        "tiers": tiers if references is not None else {},
        "no_hit": _group(rows, pairs, missed) if references is not None else None,
        "ground_truth": {
            "told": len(known),
            "matched": sum(is_true(row.text, truth) for truth, row in known if truth),
        },
        "store": {key: value for key, value in asdict(facts).items() if key.startswith(_STORE)},
    }


_STORE = ("stored", "prompts", "images")


def statuses(row: Row) -> Mapping[str, str]:
    """A request's status of each tier, that of KV reuse among them."""
    return {**row.report["tiers"], "kv_cache": row.report["kv_cache"]}


def _group(
    rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]] | None, chosen: Sequence[int]
) -> dict[str, Any]:
    """The figures of some of a pass's requests."""
    these = [rows[place] for place in chosen]
    found: dict[str, Any] = {
        "requests": len(these),
        "latency_s": summary([row.latency_s for row in these]) if these else None,
        "ttft_s": summary([row.ttft_s for row in these]) if these else None,
        "tower_calls": sum(row.tower_calls for row in these),
        "images_loaded": sum(row.report["images_loaded"] for row in these),
        "images_near": sum(row.report["images_near"] for row in these),
        "tokens": sum(row.report["prompt_tokens"] for row in these),
        "tokens_reused": sum(
            row.report["exact_tokens"] + row.report["reused_tokens"] for row in these
        ),
        "tokens_cached": sum(row.report["cached_tokens"] for row in these),
    }
    if pairs is not None:
        agreed = [agreement(*pairs[place]) for place in chosen]
        found["answers_same"] = sum(one.same for one in agreed)
        found["logprob_difference"] = (
            summary([one.difference for one in agreed]) if agreed else None
        )
    return found


def reaction(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """The control: how answers change with the image, in plain vLLM.

    Args:
        pairs: the answers to one question about two images each.
    """
    found = [agreement(one, other) for one, other in pairs]
    return {
        "questions": len(found),
        "answers_changed": sum(not one.same for one in found),
        "logprob_difference": summary([one.difference for one in found]) if found else None,
    }


# ---- for people ----------------------------------------------------------------------------------


def table(name: str, figures: Mapping[str, Any]) -> str:
    """A pass in a few lines: what each tier's hits came to, then all of it."""
    titles = (
        "hit/miss/skip",
        "latency of the hits, s",
        "tower",
        "loaded",
        "answers same",
        "logprobs",
    )
    lines = [
        f"{name}",
        f"  {'':<20}{titles[0]:>14}  {titles[1]:>26}  {titles[2]:>6}{titles[3]:>7}{titles[4]:>14}"
        f"  {titles[5]}",
    ]
    for tier, told in figures["tiers"].items():
        counts = f"{told['hit']}/{told['miss']}/{told['skip']}"
        lines.append(_line(tier, counts, told["of_its_hits"]))
    if figures["no_hit"] is not None:
        lines.append(_line("no hit at all", str(figures["no_hit"]["requests"]), figures["no_hit"]))
    lines.append(_line("all", str(figures["requests"]), figures))
    truth = figures["ground_truth"]
    if truth["told"]:
        lines.append(f"  right by the ground truth: {truth['matched']} of {truth['told']}")
    return "\n".join(lines)


def _line(name: str, counts: str, group: Mapping[str, Any]) -> str:
    latency, difference = group["latency_s"], group.get("logprob_difference")
    took = "-"
    if latency is not None:
        took = f"{latency['median']:.3f} ({latency['min']:.3f} to {latency['max']:.3f})"
    same = f"{group['answers_same']} of {group['requests']}" if "answers_same" in group else "-"
    differs = (
        "-" if difference is None else f"{difference['median']:.2g}, max {difference['max']:.2g}"
    )
    return (
        f"  {name:<20}{counts:>14}  {took:>26}  {group['tower_calls']:>6}{group['images_loaded']:>7}"
        f"{same:>14}  {differs}"
    )


# ---- plots ---------------------------------------------------------------------------------------


def draw_passes(figure: Any, passes: Mapping[str, Mapping[str, Any]]) -> None:
    """Latency, vision-tower calls and agreement, pass by pass."""
    names = list(passes)
    left, middle, right = figure.subplots(1, 3)
    medians = [passes[name]["latency_s"]["median"] for name in names]
    low = [medians[i] - passes[name]["latency_s"]["min"] for i, name in enumerate(names)]
    high = [passes[name]["latency_s"]["max"] - medians[i] for i, name in enumerate(names)]
    places = np.arange(len(names))
    left.bar(places, medians, yerr=[low, high], capsize=4, color="C0")
    left.set(title="latency of a question, s", ylim=(0, None))
    middle.bar(places, [passes[name]["tower_calls"] for name in names], color="C1")
    middle.set(title="vision-tower calls")
    with_answers = [name for name in names if "answers_same" in passes[name]]
    share = [100 * passes[name]["answers_same"] / passes[name]["requests"] for name in with_answers]
    right.bar([names.index(name) for name in with_answers], share, color="C2")
    right.set(title="answers as plain vLLM's, %", ylim=(0, 105))
    for axes in (left, middle, right):
        axes.set_xticks(places, names, rotation=30, ha="right")
