"""The selectors of `semkv_rag.blend` on the yardstick's tensors, at a cost or at a ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from semkv_rag.blend import (
    SELECTOR_TYPES,
    BlendShape,
    Candidates,
    charged_ratio,
    first_half,
    pick,
    ratio_for_charged,
)
from workbench.quality.looking import picked_look, question_looks
from workbench.quality.network import Model
from workbench.quality.passes import cache_of, columns_of, fill, read
from workbench.quality.precomputed import Fresh, Stored
from workbench.quality.questions import Questions
from workbench.quality.reuse import KV

SEED = 7


@dataclass(frozen=True, eq=False)
class Case:
    """One batch of prompts and what is stored of its contexts."""

    model: Model
    questions: Questions
    fresh: Fresh
    stored: Stored

    @property
    def contexts(self) -> int:
        return len(self.questions.contexts.lengths)

    @property
    def prompts(self) -> int:
        """Of each context."""
        return self.questions.tokens.shape[1]

    def shape(self, row: int, layers: int) -> BlendShape:
        """What context `row` has a blend do in a model of so many layers."""
        reused = len(self.stored.candidates(row))
        exact = int(self.questions.contexts.lengths[row]) - reused
        return BlendShape(layers, reused, exact, question=self.questions.length)

    def cached(self, kv: KV, times: int = 1) -> KV:
        """A cache with `kv` in it, and with room for each row's questions."""
        columns = self.questions.tokens.shape[2]
        return cache_of(kv, columns if times > 1 else columns * self.prompts, times)

    def answer(self, cache: KV) -> list[bool]:
        """Right or wrong, for each prompt in order; a cache has a row for each context or each prompt."""
        tokens = self.questions.tokens
        times = len(cache[0][0]) // self.contexts
        lengths = self.questions.contexts.lengths.repeat_interleave(times)
        split = tokens.flatten(0, 1)[:, None] if times > 1 else tokens
        last = read(self.model, cache, lengths, split)
        return self.questions.right(self.model, last.view(*tokens.shape, -1))

    def blended(self, picked: list[Tensor], first: int = 0, *, keep: bool = True) -> KV:
        """The cache in which the `picked` tokens are computed from layer `first` on.

        Args:
            picked: columns, one tensor for each context, or for each prompt.
            first: the check layer: below it all is fresh, and there too with `keep`.
        """
        times = len(picked) // self.contexts
        kept = first + keep if first else 0
        cache = self.cached(self.fresh.kv[:kept] + self.stored.kv[kept:], times)
        states = self.fresh.states[first].repeat_interleave(times, 0)
        fill(self.model, cache, states, columns_of(picked, states.shape[1]), first=first)
        return cache

    @cached_property
    def attention(self) -> list[Tensor]:
        """For each prompt, what its question gives each candidate, by layer, [layers, candidates]."""
        return question_looks(self.model, self.questions, self.stored)

    def deviation(self, selector: str, layer: int) -> list[Tensor]:
        """For each context, how far fresh KV of `layer` is from stored, [candidates]."""
        rule = SELECTOR_TYPES[selector]()
        return [
            rule.deviation(
                *(each[row][:, at].transpose(0, 1) for each in self.fresh.kv[layer]),
                *(each[row][:, at].transpose(0, 1) for each in self.stored.kv[layer]),
            )
            for row, at in ((row, self.stored.candidates(row)) for row in range(self.contexts))
        ]


class Way(ABC):
    """A selector as it is measured."""

    name: str

    @abstractmethod
    def charged(self, ratio: float, shape: BlendShape) -> float:
        """The share of full prefill that recomputing `ratio` of the reused tokens costs."""

    @abstractmethod
    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        """The largest ratio that costs at most `charged`; None where even nothing does."""

    @abstractmethod
    def cache(self, case: Case, ratios: list[float]) -> KV:
        """Picks and blends, with one ratio for each context."""


@dataclass(frozen=True)
class Ours(Way):
    """A selector of `semkv_rag.blend`, as it is."""

    selector: str
    check: int = 1

    @property
    def name(self) -> str:  # type: ignore[override]
        kind = SELECTOR_TYPES[self.selector]
        return f"{self.selector}@{self.check}" if kind.needs_check_layer else self.selector

    def charged(self, ratio: float, shape: BlendShape) -> float:
        return charged_ratio(self.selector, ratio, replace(shape, check_layer=self.check))

    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        return ratio_for_charged(self.selector, charged, replace(shape, check_layer=self.check))

    def cache(self, case: Case, ratios: list[float]) -> KV:
        rule = SELECTOR_TYPES[self.selector]()
        first = self.check if rule.needs_check_layer else 0
        times = case.prompts if rule.needs_question else 1
        behind = len(case.model.layers) - first - 1
        scores = self._scores(case, times, first)
        at = [case.stored.candidates(row) for row in range(case.contexts)]
        levels = [rule.levels(r, len(a), behind) for r, a in zip(ratios, at, strict=True)]
        if rule.looks_twice:
            scores = self._again(case, scores, [first_half(counts[0]) for counts in levels])
        picked = [
            at[index // times][pick(each, levels[index // times][0])]
            for index, each in enumerate(scores)
        ]
        if len(levels[0]) == 1:
            return case.blended(picked, first, keep=rule.keeps_check_layer)
        return self._gradually(case, picked, levels)

    def _scores(self, case: Case, times: int, check: int) -> list[Tensor]:
        """Of the candidates, for each context, or for each prompt where the question counts."""
        rule = SELECTOR_TYPES[self.selector]()
        deviations = case.deviation(self.selector, check) if rule.needs_check_layer else None
        return [
            rule.scores(
                Candidates(
                    case.stored.ranks(row),
                    SEED + row,
                    None if deviations is None else deviations[row],
                    case.attention[row * times + prompt] if rule.needs_question else None,
                )
            )
            for row in range(case.contexts)
            for prompt in range(times)
        ]

    def _again(self, case: Case, scores: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Scores in which the `counts` highest are picked, and the rest have what these attend to."""
        rule = SELECTOR_TYPES[self.selector]()
        prompts = case.prompts
        first = [pick(each, counts[index // prompts]) for index, each in enumerate(scores)]
        looking = [
            case.stored.candidates(index // prompts)[each] for index, each in enumerate(first)
        ]
        states = case.fresh.states[0]
        found = []
        for index, attention in enumerate(
            picked_look(case.model, states, prompts, case.stored, looking)
        ):
            ranks = case.stored.ranks(index // prompts)
            again = rule.scores(Candidates(ranks, SEED, None, attention))
            again[first[index]] = torch.inf
            found.append(again)
        return found

    def _gradually(self, case: Case, picked: list[Tensor], levels: list[list[int]]) -> KV:
        """Fewer go on from layer to layer: what was computed is compared there once more."""
        rule = SELECTOR_TYPES[self.selector]()
        cache = case.cached(case.fresh.kv[: self.check + 1] + case.stored.kv[self.check + 1 :])
        states = case.fresh.states[self.check]
        split = states.shape[1]
        going = columns_of(picked, split)

        def narrow(layer: int, keys: Tensor, values: Tensor) -> Tensor:
            level = layer - self.check
            if level < 1 or level >= len(levels[0]):
                return going
            for row, counts in enumerate(levels):
                here = torch.nonzero(going[row] < split).flatten()
                stored = (each[row][:, going[row, here]] for each in case.stored.kv[layer])
                deviation = rule.deviation(
                    *(each[row][:, here].transpose(0, 1) for each in (keys, values)),
                    *(each.transpose(0, 1) for each in stored),
                )
                scores = rule.scores(Candidates(here, SEED + row, deviation))
                kept = here[pick(scores, counts[level])]
                going[row] = torch.full_like(going[row], split).index_copy(
                    0, kept, going[row, kept]
                )
            return going

        fill(case.model, cache, states, going.clone(), first=self.check, narrow=narrow)
        return cache


class OwnScores(Way):
    """A rule of a study's own, which costs what one of the engine's selectors does."""

    @property
    @abstractmethod
    def like(self) -> Ours:
        """That selector; its check layer, if it has one, is the rule's."""

    @abstractmethod
    def scores(self, attention: Tensor, ranks: Tensor, deviation: Tensor | None) -> Tensor:
        """What the candidates of one prompt score, [candidates].

        Args:
            attention: what its question gives each, [layers, candidates].
            ranks: of each in its span, [candidates].
            deviation: squared, of each at the check layer, [candidates]; None without one.
        """

    def charged(self, ratio: float, shape: BlendShape) -> float:
        return self.like.charged(ratio, shape)

    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        return self.like.ratio(charged, shape)

    def cache(self, case: Case, ratios: list[float]) -> KV:
        like, deviations = self.like, None
        if SELECTOR_TYPES[like.selector].needs_check_layer:
            deviations = case.deviation(like.selector, like.check)
        picked = []
        for index, attention in enumerate(case.attention):
            row = index // case.prompts
            at = case.stored.candidates(row)
            deviation = None if deviations is None else deviations[row]
            scores = self.scores(attention, case.stored.ranks(row), deviation)
            picked.append(at[pick(scores, round(ratios[row] * len(at)))])
        return case.blended(picked, 0 if deviations is None else like.check)


@dataclass(frozen=True)
class Plain(OwnScores):
    """The question's attention, the mean over all layers, no neighbour's share.

    Nearly as in FusionRAG (arXiv 2601.12904) and ProphetKV (arXiv 2602.02579), which take the mean over
    heads too; with a `check` layer times the deviation there.
    """

    check: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "plain_attention" if self.check is None else f"plain_x_deviation@{self.check}"

    @property
    def like(self) -> Ours:
        if self.check is None:
            return Ours("query_attention")
        return Ours("deviation_x_attention", self.check)

    def scores(self, attention: Tensor, ranks: Tensor, deviation: Tensor | None) -> Tensor:
        scores = attention.mean(0)
        return scores if deviation is None else scores * deviation


def affordable(way: Way, case: Case, ratio: float, layers: int) -> list[float] | None:
    """What may be recomputed of each context; None where some context's ratio can't be had.

    Args:
        ratio: charged as in a model of so many `layers`; as it is, with 0.
    """
    if not layers:
        return [ratio] * case.contexts
    found = [way.ratio(ratio, case.shape(row, layers)) for row in range(case.contexts)]
    return None if None in found else [each for each in found if each is not None]
