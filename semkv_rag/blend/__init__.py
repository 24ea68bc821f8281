"""The arithmetic of a blend: moving keys, scoring tokens. Torch only; no vLLM, no store."""

from semkv_rag.blend.attention import Pooling, question_attention
from semkv_rag.blend.charge import BlendShape, charged_ratio, computed_rows, ratio_for_charged
from semkv_rag.blend.rotary import Rotary, rotary_candidates
from semkv_rag.blend.selectors import SELECTOR_TYPES, Candidates, Selector, pick

__all__ = [
    "SELECTOR_TYPES",
    "BlendShape",
    "Candidates",
    "Pooling",
    "Rotary",
    "Selector",
    "charged_ratio",
    "computed_rows",
    "pick",
    "question_attention",
    "ratio_for_charged",
    "rotary_candidates",
]
