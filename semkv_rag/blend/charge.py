"""What a selector costs: everything that a blend computes, as a share of the full prefill.

A recompute ratio counts picked tokens only. The charged ratio counts every token in every layer that
is computed: the fresh text, the layers that a check needs of all reused tokens, and the question's pass.
The check layer is charged in full, though only its K and V are needed; attention is charged like
everything else, by the token. So it is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from semkv_rag.selectors import selector_type


@dataclass(frozen=True)
class BlendShape:
    """What a blend has to do with. All but `layers` and `check_layer` are counts of tokens.

    Attributes:
        layers: of the model.
        reused: reused behind another context.
        exact: reused as they are.
        fresh: between spans, and so always computed.
        leading: of the fresh ones, those that stand before the first reused token that is not exact.
        question: those that a selector asks with.
    """

    layers: int
    reused: int
    exact: int = 0
    fresh: int = 0
    leading: int = 0
    question: int = 0
    check_layer: int = 1

    @property
    def tokens(self) -> int:
        return self.reused + self.exact + self.fresh


def computed_rows(selector: str, ratio: float, shape: BlendShape) -> int:
    """Tokens times layers that a blend computes: a token that goes through all counts `layers`."""
    kind, layers, fresh = selector_type(selector), shape.layers, shape.fresh
    ratio = {"none": 0.0, "all": 1.0}.get(selector, ratio)
    picked = round(ratio * shape.reused)
    if picked >= shape.reused:
        return layers * (fresh + shape.reused)
    if picked == 0:
        return layers * fresh
    rows = 0
    if kind.needs_question:
        rows += layers * (shape.question + fresh)
        fresh -= shape.leading  # its KV is right already
    if kind.needs_check_layer:
        rows += min(shape.check_layer + 1, layers) * (fresh + shape.reused)
    return rows + layers * (fresh + picked)


def charged_ratio(selector: str, ratio: float, shape: BlendShape) -> float:
    """A blend's share of the full prefill of its tokens; above 1 when it costs more than that.

    Args:
        ratio: recomputed reused tokens / reused tokens.
    """
    if shape.tokens == 0:
        return 0.0
    return computed_rows(selector, ratio, shape) / (shape.layers * shape.tokens)


def ratio_for_charged(selector: str, charged: float, shape: BlendShape) -> float | None:
    """The largest recompute ratio below 1 whose charged ratio is at most `charged`.

    None when even ratio 0 costs more. Full prefill is not looked for: ask for ratio 1.
    """
    if charged_ratio(selector, 0.0, shape) > charged:
        return None
    low, high = 0, max(shape.reused - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if charged_ratio(selector, middle / shape.reused, shape) <= charged:
            low = middle
        else:
            high = middle - 1
    return low / shape.reused if shape.reused else 0.0
