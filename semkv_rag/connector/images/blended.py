"""An image that a blend has to know, on its way from the scheduler to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec

from semkv_rag.connector.images.identifiers import StateRef


@dataclass(frozen=True)
class BlendImage:
    """The image, and what is known of its features.

    Attributes:
        feature: what vLLM has of it.
        state: its features, [rows, width], where the store has them.
        save: whose they are in the store once they are computed; None where they are not stored.
        model: what they are stored under.
    """

    feature: MultiModalFeatureSpec
    state: Tensor | None = None
    save: StateRef | None = None
    model: str = ""
