"""Selectors: which reused tokens are computed again.

A selector scores every reused token that is not exact; the `round(ratio * tokens)` best are
recomputed. It is pure: it sees tensors of one request, and knows neither vLLM nor the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Candidates:
    """The reused, inexact tokens of one request, in prompt order.

    Attributes:
        rank_in_span: [tokens], int64: 0 for the first token of each span.
        seed: the same for the same plan, so that a request that is preempted and started again
            picks the same tokens.
        keys, values: [tokens, kv_heads, head_dim], computed at the check layer in the prompt.
        stored_keys, stored_values: the same tokens' stored KV, moved to their new positions.
            All four are None for selectors that need no check layer.
    """

    rank_in_span: Tensor
    seed: int
    keys: Tensor | None = None
    values: Tensor | None = None
    stored_keys: Tensor | None = None
    stored_values: Tensor | None = None


class Selector(ABC):
    """Scores candidates; the highest are recomputed, the earlier token first among equals."""

    needs_check_layer: ClassVar[bool] = False
    """Whether the layers up to the check layer are computed for every candidate, to compare."""

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """[tokens], float32."""

    def count(self, ratio: float, tokens: int) -> int:
        """How many of `tokens` candidates are recomputed."""
        return round(ratio * tokens)


class KVDeviation(Selector):
    """CacheBlend's rule (arXiv 2405.16444, section 4.3): highest KV deviation at a check layer.

    The deviation is the squared L2 distance of the fresh key and value to the stored ones, summed
    over heads. Comparing values too matters: keys alone pick much worse.
    """

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        c = candidates
        assert c.keys is not None and c.values is not None
        assert c.stored_keys is not None and c.stored_values is not None
        key_part = (c.keys.float() - c.stored_keys.float()).square().flatten(1).sum(1)
        value_part = (c.values.float() - c.stored_values.float()).square().flatten(1).sum(1)
        return key_part + value_part


class ChunkHead(Selector):
    """EPIC's rule (arXiv 2410.15332): the first tokens of each chunk.

    Spans give in turn, so that all have equally many recomputed, until short ones are used up.
    """

    def scores(self, candidates: Candidates) -> Tensor:
        return -candidates.rank_in_span.float()


class Random(Selector):
    """A control: tokens by chance, the same ones for the same plan."""

    def scores(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(candidates.seed)
        return torch.rand(len(candidates.rank_in_span), generator=generator)


class NoTokens(Selector):
    """A control: the stored KV as it is, whatever the ratio."""

    def scores(self, candidates: Candidates) -> Tensor:
        return torch.zeros(len(candidates.rank_in_span))

    def count(self, ratio: float, tokens: int) -> int:
        return 0


class AllTokens(Selector):
    """A control: everything is computed again, whatever the ratio."""

    def scores(self, candidates: Candidates) -> Tensor:
        return torch.zeros(len(candidates.rank_in_span))

    def count(self, ratio: float, tokens: int) -> int:
        return tokens


SELECTOR_TYPES: dict[str, type[Selector]] = {
    "kv_deviation": KVDeviation,
    "chunk_head": ChunkHead,
    "random": Random,
    "none": NoTokens,
    "all": AllTokens,
}


def pick(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest `scores`, ascending, [count], int64."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def charged_ratio(*, tokens: int, picked: int, full_layers: int, layers: int) -> float:
    """A blend's share of the full prefill of `tokens` tokens, 0 to 1.

    Args:
        tokens: tokens the blend pass was asked for.
        picked: of these, those that run through every layer.
        full_layers: layers that run for all tokens: the ones below the check layer, and the check
            layer itself, of which only keys and values are needed (so this is an upper bound).
        layers: layers of the model.
    """
    if tokens == 0:
        return 0.0
    full = min(full_layers, layers)
    return (full * tokens + (layers - full) * picked) / (layers * tokens)
