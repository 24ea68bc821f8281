"""CacheBlend (arXiv 2405.16444, section 4) in plain PyTorch, over any transformers decoder.

The algorithm, in this project's words:

1. Layers below the check layer compute K and V of every token that is not exact.
2. The check layer computes them too. How far each reused token's fresh K and V are from its stored
   ones, squared and summed over both, is its deviation. The highest `round(ratio * reused)` are
   picked, the lower position first where two are equal.
3. The check layer keeps all its fresh K and V. Above it only picked tokens, and those that were
   never reused, get fresh ones; the others keep the stored ones, with keys moved to their place.
4. Exact tokens keep stored KV at every layer. The text behind the last span is computed as usual.

Selectors that look at no deviation have no check layer: what they pick is fresh from layer 0 on.

Rows of a decoder meet in attention only, and there only through K and V. So every row is run
through the whole model, and a cache hands attention the K and V that the algorithm gives each
token: what an unpicked token's row comes to reaches no other row. Nothing is left to write per
architecture.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from semkv_rag.reuse.plan import ReusePlan
from tests.reference.plain import causal
from tests.reference.stored import LayerKV, StoredKV, StoringModel


@dataclass(frozen=True, eq=False)
class BlendResult:
    """What a blend comes to.

    Attributes:
        logprobs: the next token's, [vocabulary].
        picked: prompt positions of the recomputed reused tokens, ascending.
        deviation: of each reused token at the check layer, float32 [prompt tokens], nan for others;
            None for a selector that looks at none.
        layers: per layer, the K and V each prompt token ended up with, [prompt tokens, kv_heads,
            head_dim]: what the paged cache must hold.
    """

    logprobs: Tensor
    picked: tuple[int, ...]
    deviation: Tensor | None
    layers: tuple[LayerKV, ...]


class ReferenceModel(StoringModel):
    """A model that answers by full prefill and by blending stored KV."""

    def blend(
        self,
        prompt: Sequence[int],
        plan: ReusePlan,
        stored: Mapping[str, StoredKV],
        rows: Collection[int] | None = None,
    ) -> BlendResult:
        """Answer `prompt` with the spans of `plan` taken from `stored`.

        Args:
            stored: by chunk id, as `self.stored` returns it.
            rows: the prompt positions to recompute, instead of a selector's choice. The selector
                `random` needs them.

        Raises:
            ValueError: `random` without `rows`, or rows that are not inexact reused tokens.
        """
        exact = torch.zeros(len(prompt), dtype=torch.bool)
        inexact = torch.zeros(len(prompt), dtype=torch.bool)
        for span in plan.spans:
            (exact if span.exact else inexact)[span.dst : span.end] = True
        picked = None if rows is None else _mask(rows, inexact)
        if picked is None:
            picked = _picked_up_front(plan, inexact)
        cache = _BlendCache(
            stored=self._in_prompt(len(prompt), plan, stored),
            exact=exact,
            inexact=inexact,
            picked=picked,
            check_layer=plan.options.check_layer if picked is None else -1,
            count=round(plan.options.ratio * plan.reused_tokens),
        )
        order = torch.arange(len(prompt))
        logprobs = self.forward(prompt, order, causal(order, order), cache)[-1]
        assert cache.picked is not None, "the model has no such check layer"
        return BlendResult(
            logprobs=logprobs,
            picked=tuple(cache.picked.nonzero().flatten().tolist()),
            deviation=cache.deviation,
            layers=tuple(cache.blended),
        )

    def _in_prompt(
        self, length: int, plan: ReusePlan, stored: Mapping[str, StoredKV]
    ) -> list[LayerKV]:
        """Per layer, stored K (moved) and V where they stand in the prompt; nan elsewhere."""
        layers: list[LayerKV] = []
        for span in plan.spans:
            source = slice(span.src, span.src + span.length)
            moved = self.moved(stored[span.chunk_id], span.dst - span.src)
            if not layers:
                shape = (length, *moved[0][0].shape[1:])
                layers = [
                    (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in moved
                ]
            for (keys, values), (moved_keys, moved_values) in zip(layers, moved, strict=True):
                keys[span.dst : span.end] = moved_keys[source]
                values[span.dst : span.end] = moved_values[source]
        return layers


def _picked_up_front(plan: ReusePlan, inexact: Tensor) -> Tensor | None:
    """What is picked before anything is computed, bool [prompt tokens]; None: by deviation."""
    options = plan.options
    if options.selector == "none":
        return torch.zeros_like(inexact)
    if options.selector == "all" or options.ratio == 1:
        return inexact
    if options.selector == "chunk_head":
        # The first token of every span, then the second of every span, and so on.
        ranked = sorted(
            (rank, span.dst + rank)
            for span in plan.spans
            if not span.exact
            for rank in range(span.length)
        )
        count = round(options.ratio * len(ranked))
        return _mask([position for _, position in ranked[:count]], inexact)
    if options.selector == "kv_deviation":
        return None
    raise ValueError(f"{options.selector} needs rows")


def _mask(rows: Collection[int], inexact: Tensor) -> Tensor:
    """`rows` as bool [prompt tokens]."""
    mask = torch.zeros_like(inexact)
    mask[list(rows)] = True
    if (mask & ~inexact).any():
        raise ValueError("rows are not all reused behind another context")
    return mask


@dataclass(eq=False)
class _BlendCache(DynamicCache):
    """Hands each layer's attention the K and V that the blend gives the prompt's tokens.

    Attributes:
        stored: per layer, stored K and V where they stand in the prompt.
        exact, inexact: which tokens are reused so, bool [prompt tokens].
        picked: those to recompute, bool [prompt tokens]; None until the check layer.
        check_layer: -1 when none is needed.
        count: how many the check layer picks.
    """

    stored: list[LayerKV]
    exact: Tensor
    inexact: Tensor
    picked: Tensor | None
    check_layer: int
    count: int
    deviation: Tensor | None = None
    blended: list[LayerKV] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention with all tokens' fresh K and V, [1, kv_heads, tokens, dim]."""
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        stored_keys, stored_values = self.stored[layer_idx]
        if layer_idx == self.check_layer:
            self.deviation = _deviation(keys, stored_keys) + _deviation(values, stored_values)
            self.deviation[~self.inexact] = torch.nan
            self.picked = highest(self.deviation, self.inexact, self.count)
        reuse = self.exact
        if layer_idx > self.check_layer:
            assert self.picked is not None
            reuse = reuse | (self.inexact & ~self.picked)
        keys = torch.where(reuse[:, None, None], stored_keys, keys)
        values = torch.where(reuse[:, None, None], stored_values, values)
        self.blended.append((keys, values))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def highest(deviation: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates with the highest deviation, at a tie those at lower positions.

    Args:
        deviation: [prompt tokens].
        candidates: bool [prompt tokens].

    Returns:
        bool [prompt tokens].
    """
    ranked = candidates.nonzero().flatten().tolist()
    ranked.sort(key=lambda position: (-deviation[position].item(), position))
    return _mask(ranked[:count], candidates)


def _deviation(fresh: Tensor, stored: Tensor) -> Tensor:
    """Squared L2 distance per token over all heads and dims, [tokens]."""
    return (fresh.float() - stored.float()).square().sum(dim=(1, 2))
