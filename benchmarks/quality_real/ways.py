"""One context under many ways to reuse it: what chunks are stored behind, what is computed again."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from benchmarks.quality_real.context import Context
from benchmarks.quality_real.network import Cache
from benchmarks.quality_real.outcome import Outcome
from semkv_rag.blend import (
    LOOKED_AT,
    SAMPLED,
    Candidates,
    Selector,
    expected_loss,
    left_share,
    needed,
    pick,
    selector_type,
)
from semkv_rag.config import FIRST_RATIO


class Stored:
    """A context's chunks as stored in one way, and what can be seen of them before anything is picked."""

    def __init__(self, context: Context, cache: Cache, exact_first: bool) -> None:
        self.context, self.cache = context, cache
        self.network = context.network
        candidates = context.reused.clone()
        if exact_first:
            first, end = context.spans[0]
            candidates[first:end] = False
            cache.keys[:, :, first:end] = context.full.keys[:, :, first:end]
            cache.values[:, :, first:end] = context.full.values[:, :, first:end]
        self.candidates = candidates.nonzero()[:, 0]
        fresh = (~context.reused).nonzero()[:, 0]
        self.fresh = fresh[fresh >= context.spans[0][0]]

    def tokens_at(self, places: Tensor) -> Tensor:
        return self.network.embed(torch.tensor(self.context.tokens)[places])

    @cached_property
    def looked(self) -> tuple[Tensor, Cache, int]:
        """The question's attention to each candidate, [layers, candidates], the cache behind its
        pass, and the tokens times layers that it took.
        """
        before = self.network.rows
        cache = self.cache.clone()
        if len(self.fresh):
            self.network.run(self.tokens_at(self.fresh), self.fresh, cache)
        attention = self.attention_over(cache)
        return attention, cache, self.network.rows - before

    def attention_over(self, cache: Cache) -> Tensor:
        """What the question gives each candidate over a cache, [layers, candidates]."""
        asked = self.context.asked
        places = torch.arange(self.context.end, self.context.end + len(asked))
        counted = torch.zeros(int(places[-1]) + 1, dtype=torch.bool)
        counted[self.candidates] = True
        counted[self.context.end :] = True
        seen: list[Tensor] = []
        self.network.run(self.network.embed(asked), places, cache, seen=seen, counted=counted)
        return torch.stack([one[self.candidates] for one in seen]).sqrt()

    def change(self, other: Cache) -> Tensor:
        """How far V is from another cache's, [layers, candidates]: the norm over heads."""
        places = self.candidates
        ours, theirs = self.cache.values[:, :, places], other.values[:, :, places]
        return (ours.float() - theirs.float()).square().sum((1, 3)).sqrt()

    def blended(self, picked: Tensor, cost: int) -> Outcome:
        """Picked candidates computed again in all layers, with the fresh text."""
        cache = self.cache.clone()
        before = self.network.rows
        places = torch.cat((self.candidates[picked], self.fresh)).sort().values
        if len(places):
            self.network.run(self.tokens_at(places), places, cache)
        self.last = cache
        cost += self.network.rows - before
        return self.context.answered(cache, cost / (self.network.layers * self.context.end))

    def scored(
        self, scores: Tensor, ratio: float, cost: int, weighed: Tensor | None = None
    ) -> Outcome:
        """The best by `scores` computed again.

        Args:
            weighed: attention x sensitivity, [layers, candidates]: what the estimate of the loss is of.
        """
        picked = pick(scores, round(ratio * len(self.candidates)))
        outcome = self.blended(picked, cost)
        if weighed is not None and len(picked):  # computed tokens tell how far off the others are
            change = self.seen_change(scores, picked, weighed)
            outcome.risk |= self.risk(left_share(weighed[1:].mean(0), picked), change)
        return outcome

    def seen_change(self, scores: Tensor, picked: Tensor, weighed: Tensor) -> float:
        """How far the V of the last blend's picked tokens were off, as the engine sees it."""
        seen, _, _ = self.looked
        sample = picked[pick(scores[picked], SAMPLED)]
        changed = (seen * self.change(self.last))[LOOKED_AT][:, sample].sum()
        expected = weighed[LOOKED_AT][:, sample].sum()
        return float(changed / expected) if expected > 0 else 0.0

    def automatic(self, scores: Tensor, promise: float, cost: int, weighed: Tensor) -> Outcome:
        """As many as the promise takes: what `ratio="auto"` does."""
        first = self.scored(scores, FIRST_RATIO, cost, weighed)
        if first.risk["loss"] <= promise:
            return first
        total = weighed[1:].mean(0)
        count = needed(total, scores, first.risk["change"], promise)
        picked = pick(scores, count)
        spent = round(first.charged * self.network.layers * self.context.end)
        outcome = self.blended(picked, spent)
        outcome.risk |= self.risk(left_share(total, picked), first.risk["change"])
        return outcome

    def risk(self, share: float, change: float) -> dict[str, float]:
        """What is expected, and of what."""
        count = len(self.candidates)
        loss = expected_loss(share, change, count)
        return {"left": share, "change": change, "reused": count, "loss": loss}

    def ratio_asked(self, charge: float) -> float:
        """The ratio at which a rule that asks the question is charged so much, at least 0."""
        fixed = len(self.context.asked) + 2 * len(self.fresh)
        return max(0.0, charge * self.context.end - fixed) / len(self.candidates)

    def ratio_checked(self, charge: float, check: int = 1) -> float | None:
        """The ratio at which a rule with a check layer is charged so much; None where it can't be."""
        layers, fresh = self.network.layers, len(self.fresh)
        left = charge * self.context.end * layers - (check + 1) * (len(self.candidates) + fresh)
        picked = left / (layers - check - 1) - fresh
        return picked / len(self.candidates) if picked >= 1 else None

    def checked(self, name: str, kind: Selector, ratio: float, check: int = 1) -> Outcome:
        """A published rule with a check layer, charged for it. Only what it picks stays fresh.

        Args:
            name: the way's, by which its blend is kept for the next question on the same passages.
        """
        cache, cost = self.context.once(name, lambda: self._checked(kind, ratio, check))
        charged = cost / (self.network.layers * self.context.end)
        return self.context.answered(self.context.room_behind(cache), charged)

    def _checked(self, kind: Selector, ratio: float, check: int) -> tuple[Cache, int]:
        """The cache up to the question, and the tokens times layers that it took."""
        network, before = self.network, self.network.rows
        cache = self.cache.clone()
        places = torch.cat((self.candidates, self.fresh)).sort().values
        hidden = network.run(self.tokens_at(places), places, cache, last=check)
        # What is below is stale too, but for what is picked.
        cache.keys[:check], cache.values[:check] = (
            self.cache.keys[:check],
            self.cache.values[:check],
        )
        keys, values = network.keys_values(check, hidden, places)
        mine = torch.isin(places, self.candidates)
        deviation = kind.deviation(
            keys[:, mine].transpose(0, 1),
            values[:, mine].transpose(0, 1),
            self.cache.keys[check][:, self.candidates].transpose(0, 1),
            self.cache.values[check][:, self.candidates].transpose(0, 1),
        )
        rank = self.context.rank[self.candidates]
        scores = kind.scores(Candidates(rank, 0, deviation=deviation))
        picked = self.candidates[pick(scores, round(ratio * len(self.candidates)))]
        go = torch.isin(places, picked) | torch.isin(places, self.fresh)
        network.run(hidden[go], places[go], cache, first=check)
        cost = network.rows - before
        cost += int((~go).sum())  # the check layer is charged in full
        end = self.context.end
        return Cache(cache.keys[:, :, :end].clone(), cache.values[:, :, :end].clone()), cost


def asked_score(stored: Stored, selector: str, sensitivity: Tensor | None = None) -> Tensor:
    """A selector's that asks the question and has no check layer, [candidates].

    Args:
        sensitivity: [layers, candidates].
    """
    seen, _, _ = stored.looked
    rank = stored.context.rank[stored.candidates]
    candidates = Candidates(rank, 0, attention=seen, sensitivity=sensitivity)
    return selector_type(selector)().scores(candidates)
