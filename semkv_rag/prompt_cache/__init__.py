"""Reuse for whole prompts that resemble an earlier one.

`Cascade` finds the stored prompt that a new one resembles, before the engine is asked; `guard` says
where resemblance is not enough. Usable without vLLM; the encoders and FAISS come with the extra
`prompt-cache` and are loaded when they are first needed.
"""

from semkv_rag.prompt_cache.cascade import Cascade
from semkv_rag.prompt_cache.lookup import Candidate, Explanation, Lookup
from semkv_rag.prompt_cache.normalise import Normalisation
from semkv_rag.prompt_cache.options import PromptCacheOptions
from semkv_rag.prompt_cache.vectors.encoders import (
    CallableEncoder,
    Encoder,
    PerceptualHash,
    SentenceEncoder,
)

__all__ = [
    "CallableEncoder",
    "Candidate",
    "Cascade",
    "Encoder",
    "Explanation",
    "Lookup",
    "Normalisation",
    "PerceptualHash",
    "PromptCacheOptions",
    "SentenceEncoder",
]
