"""What a model answers under full prefill, reuse, and blends: one record for each question and way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from workbench.quality import grammar, rules, words
from workbench.quality.batches import Asked, Batch, collate
from workbench.quality.network import Model
from workbench.quality.reuse import Blend, Score, blend, prefill, right, whole

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
Filter = Callable[[Asked], bool]


def cross(asked: Asked) -> bool:
    """Whether the question needs another chunk."""
    return asked.fact.cross


def control(asked: Asked) -> bool:
    """Whether it doesn't."""
    return not asked.fact.cross


@dataclass
class Scores:
    """Right or wrong by question, in one order for all ways; `contexts` says whose question it is."""

    asked: list[Asked] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    ways: dict[str, list[bool]] = field(default_factory=dict)

    def note(self, facts: Sequence[Sequence[grammar.Fact]], base: int) -> None:
        """What is asked next: of each context its facts; the first context has number `base`."""
        for row, asked in enumerate(facts):
            self.asked += [Asked(row, fact, 0) for fact in asked]
            self.contexts += [base + row] * len(asked)

    def share(self, way: str, which: Filter = lambda _: True) -> float:
        """Per cent right; nan where nothing was asked."""
        chosen = [ok for ok, a in zip(self.ways[way], self.asked, strict=True) if which(a)]
        return 100 * sum(chosen) / len(chosen) if chosen else float("nan")

    def interval(self, way: str, which: Filter, less: str | None = None) -> tuple[float, float]:
        """95 % bootstrap interval over contexts of `share(way)`, or of `share(way) - share(less)`."""
        count = max(self.contexts) + 1
        hits, total = np.zeros(count), np.zeros(count)
        minus = self.ways[less] if less is not None else [False] * len(self.asked)
        for ok, base, a, c in zip(self.ways[way], minus, self.asked, self.contexts, strict=True):
            if which(a):
                hits[c] += int(ok) - int(base)
                total[c] += 1
        draws = np.random.default_rng(0).integers(0, count, (2000, count))
        shares = 100 * hits[draws].sum(1) / np.maximum(total[draws].sum(1), 1)
        low, high = np.percentile(shares, (2.5, 97.5))
        return float(low), float(high)


def make_batches(seed: int, contexts: int, questions: int = 18, rows: int = 20) -> list[Batch]:
    """Contexts with held-out names, each with questions of all kinds."""
    draw = random.Random(seed)
    made = []
    for _ in range(contexts):
        context = grammar.make_context(draw, held=True)
        asked = draw.sample(context.facts, min(questions, len(context.facts)))
        made.append((context, asked))
    made.sort(key=lambda row: len(row[0].tokens))
    return [collate(made[start : start + rows]) for start in range(0, contexts, rows)]


def ways(seed: int) -> dict[str, tuple[Score, int, bool]]:
    """Each selector: its rule, its check layer, and whether that layer keeps all its fresh rows."""
    found: dict[str, tuple[Score, int, bool]] = {
        "HKVD@1 as published": (rules.by_deviation, 1, False),
        "HKVD@1": (rules.by_deviation, 1, True),
        "HKVD@2": (rules.by_deviation, 2, True),
        "HKVD@3": (rules.by_deviation, 3, True),
        "random": (rules.by_chance(seed), -1, True),
        "random, check layer 1 fresh": (rules.by_chance(seed), 1, True),
        "truth": (rules.by_truth(seed), -1, True),
        "token id": (rules.by_token(seed, skip_first_chunk=False), -1, True),
        "token id, not first chunk": (rules.by_token(seed, skip_first_chunk=True), -1, True),
        "ends": (rules.by_token_group(words.ENDS, seed), -1, True),
        "names": (rules.by_token_group(_NAMES, seed), -1, True),
        "it and ends": (rules.by_token_group([words.IT, *words.ENDS], seed), -1, True),
        "chunk head": (rules.by_chunk_head, -1, True),
        "chunk tail": (rules.by_chunk_tail, -1, True),
        "not first chunk": (rules.not_in_first_chunk(seed), -1, True),
    }
    return found


_NAMES = words.NAMES + words.PROPER + words.HELD_NAMES + words.HELD_PROPER
SELECTORS = ("HKVD@1 as published", "HKVD@1", "HKVD@2", "HKVD@3")
BLIND = (
    "token id",
    "token id, not first chunk",
    "ends",
    "names",
    "it and ends",
    "chunk head",
    "chunk tail",
    "not first chunk",
)
"""Rules by token id or position."""


def study(
    model: Model,
    seed: int,
    contexts: int,
    ratios: Iterable[float] = RATIOS,
    only: Iterable[str] | None = None,
) -> Scores:
    """Asks everything of `contexts` new contexts in every way.

    Ways are named `full`, `documents`, `chunks`, `fresh to N` (layers up to N fresh, nothing picked), and
    `SELECTOR R` with R in per cent.
    """
    scores = Scores()
    chosen = {n: w for n, w in ways(seed).items() if only is None or n in only}
    base = 0
    for batch in make_batches(seed, contexts):
        scores.asked += batch.asked
        scores.contexts += [base + a.row for a in batch.asked]
        base += len(batch.lengths)
        for name, ok in _ask(model, batch, chosen, tuple(ratios)):
            scores.ways.setdefault(name, []).extend(ok)
    return scores


def _ask(
    model: Model,
    batch: Batch,
    chosen: dict[str, tuple[Score, int, bool]],
    ratios: tuple[float, ...],
) -> Iterable[tuple[str, list[bool]]]:
    last, _ = prefill(model, batch, whole(batch))
    yield "full", right(model, batch, last)
    last, _ = prefill(model, batch, batch.documents)
    yield "documents", right(model, batch, last)
    last, stored = prefill(model, batch, batch.chunks)
    yield "chunks", right(model, batch, last)
    for layer in range(len(model.layers) - 1):
        how = Blend(0.0, rules.by_deviation, check=layer)
        yield f"fresh to {layer}", right(model, batch, blend(model, batch, stored, how)[0])
    for name, (score, check, keep) in chosen.items():
        for ratio in ratios:
            if ratio == 0 and (check < 0 or not keep):
                continue  # that is `chunks`
            how = Blend(ratio, score, check, keep)
            yield (
                f"{name} {100 * ratio:g}",
                right(model, batch, blend(model, batch, stored, how)[0]),
            )


def tells(model: Model, batches: Iterable[Batch]) -> list[float]:
    """For each layer, how often a token that matters deviates more than one that does not, in per cent.

    50: deviations there say nothing; 100: all. Of tokens behind the first chunk.
    """
    by_layer: list[list[float]] = [[] for _ in model.layers]
    for batch in batches:
        _, fresh = prefill(model, batch, whole(batch))
        _, stored = prefill(model, batch, batch.chunks)
        matter = torch.zeros(batch.chunks.shape, dtype=torch.bool)
        for row, carrier in batch.carriers:
            matter[row, carrier.position] |= carrier.cross
        for layer, (old, new) in enumerate(zip(stored, fresh, strict=True)):
            deviation = sum(((n - o).square().sum((1, 3)) for o, n in zip(old, new, strict=True)))
            assert isinstance(deviation, torch.Tensor)
            for row in range(len(batch.lengths)):
                late = batch.chunks[row] > 0
                high = deviation[row, late & matter[row]]
                low = deviation[row, late & ~matter[row]]
                if len(high) and len(low):
                    more = (high[:, None] > low[None, :]).float()
                    equal = (high[:, None] == low[None, :]).float()
                    by_layer[layer].append((more + equal / 2).mean().item())
    return [100 * sum(each) / len(each) for each in by_layer]
