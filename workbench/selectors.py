"""Selectors of a user's own, registered as a user would: one by chance, one that needs every pass, one
that fails."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import Candidates, Selector, register_selector
from semkv_rag.blend.selectors import QueryAttention

ROUNDING = 1e-6
"""Of the largest deviation: what is less is rounding. Where windows are short, all that the question sees
may have no more, and two ranks would put that in different orders."""


class ByChance(Selector):
    """The same tokens for the same plan."""

    def scores(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(candidates.seed)
        return torch.rand(len(candidates.rank_in_span), generator=generator)


class DeviationTimesAttention(QueryAttention):
    """What differs and is asked for: the product of both scores."""

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        changed = candidates.deviation > ROUNDING * candidates.deviation.max()
        return candidates.deviation * changed * super().scores(candidates)


class Failing(Selector):
    """Has a fault."""

    def scores(self, candidates: Candidates) -> Tensor:
        raise ZeroDivisionError("in a selector of a user's own")


def register() -> None:
    """In this process, and in the engines that it starts afterwards."""
    register_selector("by_chance", ByChance)
    register_selector("failing", Failing)
    register_selector("deviation_x_attention", DeviationTimesAttention)
