"""Does reuse pay: sizes and times from a model's config and a machine's rates."""

from semkv_rag.planning.machines import GPUS, STORAGE_GB_PER_S, storage_gb_per_s
from semkv_rag.planning.model_shape import ModelShape, model_shape
from semkv_rag.planning.plan import PROMPTS, Plan, PresetPlan, PromptPlan, make_plan
from semkv_rag.planning.timing import Measured, Timing, timing_of, timing_of_gpu

__all__ = [
    "GPUS",
    "PROMPTS",
    "STORAGE_GB_PER_S",
    "Measured",
    "ModelShape",
    "Plan",
    "PresetPlan",
    "PromptPlan",
    "Timing",
    "make_plan",
    "model_shape",
    "storage_gb_per_s",
    "timing_of",
    "timing_of_gpu",
]
