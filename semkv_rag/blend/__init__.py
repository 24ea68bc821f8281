"""The arithmetic of a blend: moving keys, scoring tokens. Torch only; no vLLM, no store."""

from semkv_rag.blend.rotary import Rotary, rotary_candidates
from semkv_rag.blend.selectors import (
    SELECTOR_TYPES,
    Candidates,
    Selector,
    charged_ratio,
    pick,
)

__all__ = [
    "SELECTOR_TYPES",
    "Candidates",
    "Rotary",
    "Selector",
    "charged_ratio",
    "pick",
    "rotary_candidates",
]
