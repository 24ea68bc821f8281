"""The arithmetic of a blend: moving keys, scoring tokens. Torch only; no vLLM, no store."""

from semkv_rag.blend.attention import smoothed, squared_attention
from semkv_rag.blend.charge import BlendShape, charged_ratio, computed_rows, ratio_for_charged
from semkv_rag.blend.risk import LOOKED_AT, SAMPLED, expected_loss, left_share, needed
from semkv_rag.blend.rotary import Rotary, rotary_candidates
from semkv_rag.blend.selectors import Candidates, Selector, pick
from semkv_rag.blend.sensitivity import decoded, encoded, sensitivity_of
from semkv_rag.selectors import register_selector, selector_type

__all__ = [
    "LOOKED_AT",
    "SAMPLED",
    "BlendShape",
    "Candidates",
    "Rotary",
    "Selector",
    "charged_ratio",
    "computed_rows",
    "decoded",
    "encoded",
    "expected_loss",
    "left_share",
    "needed",
    "pick",
    "ratio_for_charged",
    "register_selector",
    "rotary_candidates",
    "selector_type",
    "sensitivity_of",
    "smoothed",
    "squared_attention",
]
