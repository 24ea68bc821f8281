"""Selectors that follow the question's attention further than `semkv_rag.blend` does yet.

* `smoothed` gives each token the mean of its own and its neighbours' scores in its span, as SnapKV's
  pooling does (arXiv 2404.14469, section 4.1): the tokens behind an attended one are often read next.
* A second look: the tokens that the question attends to are run over the stored KV, and what they attend
  to is picked too. What a picked token refers to is not what the question refers to.

The first layer's attention is left out: it knows words and places only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality.passes import Seen, cache_of, columns_of, fill
from benchmarks.quality.reuse import KV
from benchmarks.quality.ways import Case, Way
from semkv_rag.blend import question_attention
from semkv_rag.blend.charge import BlendShape, charged_ratio, ratio_for_charged
from semkv_rag.blend.selectors import pick


def smoothed(scores: Tensor, ranks: Tensor) -> Tensor:
    """Mean of each token's score, its left and its right neighbour's, none behind a span's ends.

    Args:
        scores: [..., tokens].
        ranks: which token of its span each is, [tokens].
    """
    inside = (ranks[1:] > 0).to(scores.dtype)
    total = scores.clone()
    total[..., 1:] += scores[..., :-1] * inside
    total[..., :-1] += scores[..., 1:] * inside
    return total / 3


@dataclass(frozen=True)
class SmoothedAttention(Way):
    """The question's attention, smoothed; with a `check` layer times the deviation there."""

    check: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "smoothed_attention" if self.check is None else f"smoothed_x_deviation@{self.check}"

    @property
    def _like(self) -> str:
        return "query_attention" if self.check is None else "deviation_x_attention"

    def _shape(self, shape: BlendShape) -> BlendShape:
        return replace(shape, check_layer=self.check or 0)

    def charged(self, ratio: float, shape: BlendShape) -> float:
        return charged_ratio(self._like, ratio, self._shape(shape))

    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        return ratio_for_charged(self._like, charged, self._shape(shape))

    def cache(self, case: Case, ratios: list[float]) -> KV:
        deviation = None if self.check is None else case.deviation(self._like, self.check)
        picked = []
        for row, ratio in enumerate(ratios):
            at = case.stored.candidates(row)
            for prompt in range(case.prompts):
                scores = _first_look(case, row, prompt)
                if deviation is not None:
                    scores = scores * deviation[row]
                picked.append(at[pick(scores, round(ratio * len(at)))])
        return case.blended(picked, self.check or 0)


@dataclass(frozen=True)
class TwoLooks(Way):
    """Half of what is picked is what the question attends to, the other half what that attends to."""

    name: str = "two_looks"

    def rows(self, picked: int, shape: BlendShape) -> int:
        """Tokens times layers that are computed."""
        if picked >= shape.reused:
            return shape.layers * (shape.fresh + shape.reused)
        if picked == 0:
            return shape.layers * shape.fresh
        first = shape.question + shape.fresh
        return shape.layers * (first + _half(picked) + shape.fresh - shape.head + picked)

    def charged(self, ratio: float, shape: BlendShape) -> float:
        return self.rows(round(ratio * shape.reused), shape) / (shape.layers * shape.tokens)

    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        costs = [self.rows(picked, shape) for picked in range(shape.reused)]
        affordable = [
            picked
            for picked, rows in enumerate(costs)
            if rows <= charged * shape.layers * shape.tokens
        ]
        return affordable[-1] / shape.reused if affordable else None

    def cache(self, case: Case, ratios: list[float]) -> KV:
        first: list[Tensor] = []
        for row, ratio in enumerate(ratios):
            at = case.stored.candidates(row)
            count = _half(round(ratio * len(at)))
            for prompt in range(case.prompts):
                first.append(at[pick(_first_look(case, row, prompt), count)])
        picked = []
        for index, (scores, looked) in enumerate(zip(_look_again(case, first), first, strict=True)):
            row = index // case.prompts
            at = case.stored.candidates(row)
            rest = scores.masked_fill(torch.isin(at, looked), -1.0)
            more = at[pick(rest, round(ratios[row] * len(at)) - len(looked))]
            picked.append(torch.cat((looked, more)).sort().values)
        return case.blended(picked)


def _half(count: int) -> int:
    return -(-count // 2)


def _first_look(case: Case, row: int, prompt: int) -> Tensor:
    """What a prompt's question attends to behind the first layer, [candidates]."""
    attention = case.attention[row * case.prompts + prompt]
    return smoothed(attention[1:].mean(0), case.stored.ranks(row))


def _look_again(case: Case, looked: list[Tensor]) -> list[Tensor]:
    """For each prompt, what its `looked` tokens attend to when they see the stored KV, [candidates]."""
    cache = cache_of(case.stored.kv, 0, case.prompts)
    states = case.fresh.states[0].repeat_interleave(case.prompts, 0)
    seen = Seen()
    fill(case.model, cache, states, columns_of(looked, states.shape[1]), seen=seen)
    found = []
    for index, columns in enumerate(looked):
        row = index // case.prompts
        at, ranks = case.stored.candidates(row), case.stored.ranks(row)
        scores = torch.zeros(len(at))
        if len(columns):
            visible = torch.cat(
                (at[None] < columns[:, None], torch.eye(len(columns)).bool()), dim=1
            )
            for layer in range(1, len(case.model.layers)):
                query = seen.queries[layer][index, :, : len(columns)].transpose(0, 1)
                own = seen.keys[layer][index, :, : len(columns)]
                keys = torch.cat((case.stored.kv[layer][0][row][:, at], own), dim=1)
                attention = question_attention(
                    query, keys.transpose(0, 1), visible, scale=query.shape[-1] ** -0.5
                )
                scores += attention[: len(at)]
        found.append(smoothed(scores, ranks))
    return found
