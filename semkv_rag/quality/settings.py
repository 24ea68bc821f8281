"""What is compared: the presets, and a grid of selectors and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from semkv_rag.config import AUTO, DEFAULT_NAMESPACE, PRESETS, ReuseOptions

AS_STORED = "as stored"
"""The stored KV as it is, nothing recomputed: what there is to win, and the quickest to ask first."""
EXACT = "exact"
"""The preset that answers as full prefill does: how far full prefill is from itself."""
DEFAULT_SELECTORS = tuple(
    dict.fromkeys((*(preset.selector for preset in PRESETS.values()), "kv_deviation", "chunk_head"))
)
DEFAULT_RATIOS = (0.05, 0.15, 0.3)


@dataclass(frozen=True, slots=True)
class Setting:
    """Reuse options under a name."""

    name: str
    options: ReuseOptions

    @property
    def ratio(self) -> float:
        """The ratio that is asked for; 0 for `auto`, which asks for none."""
        return 0.0 if self.options.ratio == AUTO else float(self.options.ratio)


def grid(
    selectors: Sequence[str] = DEFAULT_SELECTORS,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    question_tokens: int | None = None,
) -> list[Setting]:
    """The stored KV as it is, the presets, and every selector at every ratio that no preset is.

    Raises:
        OptionError: a selector or a ratio cannot be used.
    """
    base = ReuseOptions(namespace=namespace, question_tokens=question_tokens)
    named = {AS_STORED: ReuseOptions.from_mapping({"selector": "none", "ratio": 0.0}, base)}
    for preset in PRESETS:
        named[preset] = ReuseOptions.from_mapping({"preset": preset}, base)
    for selector in dict.fromkeys(selectors):
        for ratio in dict.fromkeys(ratios):
            options = ReuseOptions.from_mapping({"selector": selector, "ratio": ratio}, base)
            # What is promised means nothing at a given ratio.
            asked = [replace(one, promise=options.promise) for one in named.values()]
            if options not in asked:
                named[f"{selector} {ratio * 100:g} %"] = options
    return [Setting(name, options) for name, options in named.items()]
