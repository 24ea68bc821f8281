"""The model that a request to our own routes names: the one that is served, or it with a LoRA adapter."""

from __future__ import annotations

from typing import Any

from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.errors import OptionError


def capturer_of(capturer: LLMCapturer, served: Any, name: object) -> LLMCapturer:
    """What stores for the model of a name.

    Args:
        capturer: of the model alone.
        served: vLLM's `OpenAIServingModels`; adapters may be loaded and unloaded while it serves.
        name: as vLLM's routes take it.

    Raises:
        OptionError: the server has no such model, or the adapter is in no folder of its machine.
    """
    names = [path.name for path in served.base_model_paths]
    if name in names:
        return capturer
    # Its own request: an adapter is known to vLLM's workers by the number that is in there.
    lora = served.lora_requests.get(name) if isinstance(name, str) else None
    if lora is None:
        there = ", ".join([*names, *served.lora_requests])
        raise OptionError(f"there is no such model: it has {there}")
    return capturer.with_adapter(lora)
