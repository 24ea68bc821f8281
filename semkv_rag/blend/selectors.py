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
            `squared_attention`, or in a second look what the tokens that were picked first give it. The
            first layer, which knows words and places only, counts nowhere. None for selectors that need
            no question.
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

    looks_twice: ClassVar[bool] = False
    """Whether half of the tokens are picked by what the question attends to, run over the stored KV, and
    the other half by what those attend to."""

    weighs_layers: ClassVar[bool] = False
    """Whether attention is weighed, layer by layer, by the sensitivity that is stored with the chunk."""

    keeps_check_layer: ClassVar[bool] = True
    """Whether all fresh K and V of the check layer stay, or only those of picked tokens."""

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

    def levels(self, ratio: float, tokens: int, layers: int) -> list[int]:
        """How many of `tokens` candidates go on: one number, or one for each layer, not rising.

        Args:
            layers: layers behind the check layer.
        """
        return [round(ratio * tokens)]


class KVDeviation(Selector):
    """CacheBlend's rule (arXiv 2405.16444, section 4.3): highest KV deviation at a check layer."""

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class GradualKVDeviation(KVDeviation):
    """CacheBlend's gradual filtering (arXiv 2405.16444, section 4.3): r1 > r2 > … over the layers.

    What was picked at one layer is compared again there, and the highest of it go on behind the next.
    The paper gives no numbers: here the share falls evenly from half above to half below `ratio`, and
    is `ratio` on average.
    """

    SPREAD = 0.5

    def levels(self, ratio: float, tokens: int, layers: int) -> list[int]:
        spread = min(self.SPREAD, 1 / ratio - 1) if ratio else 0.0
        steps = max(layers - 1, 1)
        return [
            round(ratio * (1 + spread * (1 - 2 * layer / steps)) * tokens)
            for layer in range(layers)
        ] or [round(ratio * tokens)]


class PublishedKVDeviation(KVDeviation):
    """CacheBlend as published: at the check layer too only picked tokens are fresh."""

    keeps_check_layer = False


class PublishedKDeviation(PublishedKVDeviation):
    """The rule of LMCache's blender: keys alone are compared, and only picked tokens are fresh."""

    def deviation(
        self, keys: Tensor, values: Tensor, stored_keys: Tensor, stored_values: Tensor
    ) -> Tensor:
        return _distance(keys, stored_keys)


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

    Each token counts with `REACH` neighbours on either side. A fact that is computed in part, some of a
    number's digits, say, may come out worse than one that is all stale.
    """

    weighs_layers = True

    REACH = 4

    def scores(self, candidates: Candidates) -> Tensor:
        asked, sensitivity = candidates.attention, candidates.sensitivity
        assert asked is not None
        if sensitivity is not None:
            asked = asked * sensitivity.sqrt()
        rank = candidates.rank_in_span.to(asked.device)
        return smoothed(asked[1:].sum(0), rank, self.REACH)


class TwoHopAttention(QueryAttention):
    """Half of them as `QueryAttention`, the other half what that half attends to.

    What a question is about often refers to something else, which the question itself has no reason to
    attend to: only the tokens that it finds do.
    """

    looks_twice = True


class DeviationWeightedAttention(QueryAttention):
    """The same score, weighted by how far the token's KV is off, as far as that can be trusted.

    A stale token does harm by about the attention that it gets times how far off its KV is: the norm of
    the deviation, not its square. At an early check layer that norm may say little of later layers, and
    a few tokens stand out for no reason. So `DOUBT` times the mean norm is added to each: where the norm
    says nothing, the order is still that of attention, or nearly.

    That the layers up to the check layer are computed for all tokens is worth as much: what they need of
    other chunks there is then right for all of them.
    """

    needs_check_layer = True

    DOUBT = 4.0

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        norm = candidates.deviation.sqrt()
        return super().scores(candidates) * (norm + self.DOUBT * norm.mean())


class DeviationTimesAttention(QueryAttention):
    """What differs and is asked for: the product of both scores."""

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation * super().scores(candidates)


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


class Unscored(Selector):
    """The controls `none` and `all`: their ratio is 0 or 1, and no score is asked for."""

    def scores(self, candidates: Candidates) -> Tensor:
        return torch.zeros(len(candidates.rank_in_span))


SELECTOR_TYPES: dict[str, type[Selector]] = {
    "kv_deviation": KVDeviation,
    "kv_deviation_gradual": GradualKVDeviation,
    "sensitivity_attention": SensitivityAttention,
    "query_attention": QueryAttention,
    "two_hop_attention": TwoHopAttention,
    "deviation_weighted_attention": DeviationWeightedAttention,
    "deviation_x_attention": DeviationTimesAttention,
    "chunk_head": ChunkHead,
    "random": Random,
    "none": Unscored,
    "all": Unscored,
    "kv_deviation_published": PublishedKVDeviation,
    "k_deviation_published": PublishedKDeviation,
}


MOST_LOOKING = 512
"""Of the tokens that are picked first, so many take the second look: its cost is bounded."""


def first_half(count: int) -> int:
    """How many of `count` tokens a selector that looks twice picks first."""
    return -(-count // 2)


def pick(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest `scores`, ascending, [count], int64."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def _distance(fresh: Tensor, stored: Tensor) -> Tensor:
    return (fresh.float() - stored.float()).square().flatten(1).sum(1)
