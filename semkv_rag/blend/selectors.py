"""Selectors: which reused tokens are computed again.

A selector scores every reused token that is not exact; the highest are recomputed. It is pure: it sees
tensors of one request, and knows neither vLLM nor the store. What it asks for costs something: a check
layer has the layers up to it computed for every reused token, a question a pass of its own over the
stored KV. `charge` says how much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv_rag.blend.attention import smoothed


@dataclass(frozen=True, eq=False)
class Candidates:
    """The reused, inexact tokens of one request, in prompt order.

    Attributes:
        rank_in_span: [tokens], int64: 0 for the first token of each span.
        seed: the same for the same plan, so that a request that is preempted and started again
            picks the same tokens.
        deviation: [tokens], float32: of fresh from stored KV at the check layer, as the selector's
            `deviation` measures it, over all heads. None for selectors without a check layer.
        attention: [layers, tokens], float32: what the question gives each token, the root of
            `squared_attention`. The first layer, which knows words and places only, counts nowhere.
            None for selectors that need no question.
        sensitivity: [layers, tokens], float32, as stored with the chunks; None where it was not, and for
            selectors that do not weigh layers.
    """

    rank_in_span: Tensor
    seed: int
    deviation: Tensor | None = None
    attention: Tensor | None = None
    sensitivity: Tensor | None = None


class Selector(ABC):
    """Scores candidates; the highest are recomputed, the earlier token first among equals."""

    needs_check_layer: ClassVar[bool] = False
    """Whether the layers up to the check layer are computed for every candidate, and fresh and stored KV
    compared there."""

    needs_question: ClassVar[bool] = False
    """Whether the question is run over the stored KV first, to see what it attends to."""

    weighs_layers: ClassVar[bool] = False
    """Whether attention is weighed, layer by layer, by the sensitivity that is stored with the chunk."""

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """[tokens], float32."""

    def deviation(
        self, keys: Tensor, values: Tensor, stored_keys: Tensor, stored_values: Tensor
    ) -> Tensor:
        """How far fresh KV is from stored, [tokens], float32.

        The squared L2 distance of key and value, summed over heads: a sum, so that ranks that hold
        some of the heads each add up to that of all. Comparing values too matters: keys alone pick
        much worse.

        Args:
            keys, values: [tokens, kv_heads, head_dim], computed in the prompt.
            stored_keys, stored_values: the same tokens', keys moved to their new positions.
        """
        return _distance(keys, stored_keys) + _distance(values, stored_values)


class KVDeviation(Selector):
    """CacheBlend's rule (arXiv 2405.16444, section 4.3): highest KV deviation at a check layer."""

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class QueryAttention(Selector):
    """The tokens that the question attends to over their stored keys, and their neighbours.

    As in FusionRAG (arXiv 2601.12904) and ProphetKV (arXiv 2602.02579), but that heads and question
    tokens are joined by the root of their mean square, that the first layer does not count and that
    scores are smoothed.
    """

    needs_question = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.attention is not None
        asked = candidates.attention[1:].sum(0)
        return smoothed(asked, candidates.rank_in_span.to(asked.device))


class SensitivityAttention(QueryAttention):
    """What is asked for and depends on what stood before: attention and sensitivity, over all layers.

    What a stale token does to an answer is, in each layer, the attention that it gets times how far its V
    are off there. The second is not known, but how much they change with what stands before is, from
    when the chunk was stored. No layer is computed to find it out. It is a guess, and its root counts:
    with it in full, the first tokens of chunks are all that is picked, and of facts that the question
    compares some are computed and others left stale, which is worse than all stale. Chunks that were
    stored without are scored by attention alone.

    Each token counts with `BEFORE` tokens before it and `BEHIND` behind it. A fact that is computed in
    part, some of a number's digits, say, may come out worse than one that is all stale. More before it
    than behind it: a question attends to what it names, and wants to know what follows that.
    """

    weighs_layers = True

    BEFORE = 8
    BEHIND = 4

    def scores(self, candidates: Candidates) -> Tensor:
        asked, sensitivity = candidates.attention, candidates.sensitivity
        assert asked is not None
        if sensitivity is not None:
            asked = asked * sensitivity.sqrt()
        rank = candidates.rank_in_span.to(asked.device)
        return smoothed(asked[1:].sum(0), rank, self.BEFORE, self.BEHIND)


class ChunkHead(Selector):
    """EPIC's rule (arXiv 2410.15332): the first tokens of each chunk.

    Spans give in turn, so that all have equally many recomputed, until short ones are used up.
    """

    def scores(self, candidates: Candidates) -> Tensor:
        return -candidates.rank_in_span.float()


class Unscored(Selector):
    """The controls `none` and `all`: their ratio is 0 or 1, and no score is asked for."""

    def scores(self, candidates: Candidates) -> Tensor:
        return torch.zeros(len(candidates.rank_in_span))


def pick(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest `scores`, ascending, [count], int64."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def _distance(fresh: Tensor, stored: Tensor) -> Tensor:
    return (fresh.float() - stored.float()).square().flatten(1).sum(1)
