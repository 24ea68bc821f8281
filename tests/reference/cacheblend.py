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

Those that look at the question score what it attends to (`asked`), each token with its neighbours.
`sensitivity_attention` counts eight tokens before it and four behind it, and in each layer attention
times the root of the token's stored sensitivity. `deviation_x_attention` is the deviation times what
is asked for. Where the ratio picks no token, nothing is looked at.

Rows of a decoder meet in attention only, and there only through K and V. So every row is run
through the whole model, and a cache hands attention the K and V that the algorithm gives each
token: what an unpicked token's row comes to reaches no other row. Nothing is left to write per
architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
                `by_chance` needs them.

        Raises:
            ValueError: `by_chance` without `rows`, or rows that are not inexact reused tokens.
        """
        exact, inexact = masks(plan, len(prompt))
        picked = None if rows is None else _mask(rows, inexact)
        selector = plan.options.selector
        asked = None
        if picked is None and plan.question is not None:
            asked = self.asked(prompt, plan, stored)
            near = (8, 4) if selector == "sensitivity_attention" else (1, 1)
            asked = with_neighbours(asked, plan, *near)
        if picked is None:
            picked = _picked_up_front(plan, inexact, asked)
        up_front = picked is not None
        cache = _BlendCache(
            turned=self.turned,
            stored=self.in_prompt(len(prompt), plan, stored),
            exact=exact,
            inexact=inexact,
            picked=picked,
            check_layer=-1 if up_front else plan.options.check_layer,
            count=round(plan.options.ratio * plan.reused_tokens),
            asked=asked,
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

    def asked(
        self, prompt: Sequence[int], plan: ReusePlan, stored: Mapping[str, StoredKV]
    ) -> Tensor:
        """What the plan's question attends to, [prompt tokens], nan where nothing can be picked.

        The mean over layers is taken, without the first. For `sensitivity_attention` each layer's is
        times the root of the sensitivity there.
        """
        _, inexact = masks(plan, len(prompt))
        by_layer = self.asked_by_layer(prompt, plan, stored)
        if plan.options.selector == "sensitivity_attention":
            by_layer = by_layer * torch.as_tensor(sensitivity_of(plan, stored)).sqrt()
        asked = torch.full((len(prompt),), torch.nan)
        asked[inexact] = by_layer[1:].mean(0)
        return asked

    def asked_by_layer(
        self, prompt: Sequence[int], plan: ReusePlan, stored: Mapping[str, StoredKV]
    ) -> Tensor:
        """What the plan's question attends to, [layers, tokens that can be picked].

        The question is run over the stored KV of all spans. Its weights are shared out among the
        tokens that can be picked and its own, and attention sinks where there are any; the root of
        the mean square over its tokens and heads is taken.
        """
        question = plan.question
        assert question is not None
        tokens = [*prompt[: question.position], *question.tokens]
        exact, inexact = masks(plan, max(len(tokens), len(prompt)))
        first = int(inexact.nonzero()[0])
        order = torch.arange(len(tokens))
        own = order >= max(question.position, first)
        cache = _BlendCache(
            turned=self.turned,
            stored=self.in_prompt(len(tokens), plan, stored),
            exact=exact[: len(tokens)],
            inexact=inexact[: len(tokens)],
            picked=inexact[: len(tokens)] & own,
            check_layer=-1,
        )
        weights = self.weights(tokens, order, causal(order, order), cache)[:, :, own]
        sunk = 1 - weights.sum(-1, keepdim=True)
        weights[..., ~(inexact[: len(tokens)] | own)] = 0
        weights /= weights.sum(-1, keepdim=True) + sunk
        return weights.square().mean((1, 2)).sqrt()[:, inexact[: len(tokens)]]

    def in_prompt(
        self, length: int, plan: ReusePlan, stored: Mapping[str, StoredKV]
    ) -> list[LayerKV]:
        """Per layer, stored K (moved) and V where they stand in the prompt; nan elsewhere."""
        layers: list[LayerKV] = []
        for span in plan.spans:
            source = slice(span.src, span.src + span.length)
            moved = self.moved(stored[span.chunk_id], span.dst - span.src)
            if not layers:
                layers = [
                    (
                        torch.full((length, *keys.shape[1:]), torch.nan),
                        torch.full((length, *values.shape[1:]), torch.nan),
                    )
                    for keys, values in moved
                ]
            for (keys, values), (moved_keys, moved_values) in zip(layers, moved, strict=True):
                keys[span.dst : span.end] = moved_keys[source]
                values[span.dst : span.end] = moved_values[source]
        return layers


def change_of(
    blended: BlendResult,
    attention: Tensor,
    plan: ReusePlan,
    stored: Sequence[LayerKV],
    sens: Tensor,
) -> float:
    """How far fresh V are from stored, by their sensitivity: of the picked tokens, by attention.

    In the second layer and every third behind it.
    """
    _, inexact = masks(plan, len(stored[0][0]))
    columns = inexact.nonzero().flatten()
    picked = torch.isin(columns, torch.tensor(blended.picked))
    changed = expected = 0.0
    for layer in range(1, len(stored), 3):
        off = (blended.layers[layer][1] - stored[layer][1])[columns[picked]].flatten(1).norm(dim=1)
        changed += float((attention[layer, picked] * off).sum())
        expected += float((attention[layer, picked] * sens[layer, picked]).sum())
    return changed / expected


def sensitivity_of(plan: ReusePlan, stored: Mapping[str, StoredKV]) -> Tensor | float:
    """Of the tokens that can be picked, [layers, tokens]; the known ones' mean where it is not known."""
    spans = [span for span in plan.spans if not span.exact]
    given = [stored[span.chunk_id].sensitivity for span in spans]
    parts = [
        one[:, span.src : span.src + span.length]
        for span, one in zip(spans, given, strict=True)
        if one is not None
    ]
    if not parts:
        return 1.0
    mean = torch.cat(parts, 1).mean(1)[:, None]
    rest = iter(parts)
    return torch.cat(
        [
            mean.expand(-1, span.length) if one is None else next(rest)
            for span, one in zip(spans, given, strict=True)
        ],
        1,
    )


def masks(plan: ReusePlan, length: int) -> tuple[Tensor, Tensor]:
    """The tokens that are reused as they are, and behind another context; bool [length] each."""
    exact = torch.zeros(length, dtype=torch.bool)
    inexact = torch.zeros(length, dtype=torch.bool)
    for span in plan.spans:
        (exact if span.exact else inexact)[span.dst : span.end] = True
    return exact, inexact


def with_neighbours(scores: Tensor, plan: ReusePlan, before: int = 1, behind: int = 1) -> Tensor:
    """Each token's score and its neighbours' within its span, [prompt tokens], by their most."""
    summed = torch.full_like(scores, torch.nan)
    for span in plan.spans:
        for place in range(span.dst, span.end):
            near = range(max(place - before, span.dst), min(place + behind + 1, span.end))
            summed[place] = sum(scores[other] for other in near) / (before + behind + 1)
    return summed


def _picked_up_front(plan: ReusePlan, inexact: Tensor, asked: Tensor | None) -> Tensor | None:
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
    if options.selector != "by_chance" and round(options.ratio * plan.reused_tokens) == 0:
        return torch.zeros_like(inexact)
    if options.selector in ("query_attention", "sensitivity_attention"):
        assert asked is not None
        return highest(asked, inexact, round(options.ratio * plan.reused_tokens))
    if "deviation" in options.selector:
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
        turned: the model's `turned`.
        stored: per layer, stored K and V where they stand in the prompt.
        exact, inexact: which tokens are reused so, bool [prompt tokens].
        picked: those to recompute, bool [prompt tokens]; None until the check layer.
        check_layer: -1 when none is needed.
        count: how many are picked there.
        asked: what the question attends to, if that counts.
    """

    turned: Callable[[Tensor, Tensor], LayerKV]
    stored: list[LayerKV]
    exact: Tensor
    inexact: Tensor
    picked: Tensor | None
    check_layer: int
    count: int = 0
    asked: Tensor | None = None
    deviation: Tensor | None = None
    blended: list[LayerKV] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention with all tokens' fresh K and V, [1, kv_heads, tokens, dim]."""
        keys, values = self.turned(key_states[0], value_states[0])
        stored_keys, stored_values = self.stored[layer_idx]
        fresh = self.picked  # None: all that are not exact
        if layer_idx == self.check_layer:
            self._pick(layer_idx, keys, values)
        reuse = self.exact if fresh is None else self.exact | (self.inexact & ~fresh)
        keys = torch.where(reuse[:, None, None], stored_keys, keys)
        values = torch.where(reuse[:, None, None], stored_values, values)
        self.blended.append((keys, values))
        one, other = self.turned(keys, values)
        return one[None], other[None]

    def _pick(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Pick those that are fresh above the check layer."""
        stored_keys, stored_values = self.stored[layer_idx]
        deviation = _deviation(keys, stored_keys) + _deviation(values, stored_values)
        self.deviation = torch.where(self.inexact, deviation, torch.nan)
        score = deviation if self.asked is None else deviation * self.asked
        self.picked = highest(score, self.inexact, self.count)


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
