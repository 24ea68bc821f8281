"""Which of vLLM's kernels the forwards of blends use, noted in the engine's process."""

from __future__ import annotations

from collections import Counter
from typing import Any


def watch(worker: Any) -> None:
    """Have the engine's process note what each forward of a blend used."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    model = get_kv_transfer_group().executor._blend_pass.setting.model
    run, model.used = model._model, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        layers = [layer for layer, _, _ in model._kernels._layers]
        model.used.append(Counter(layer._forward_method.__name__ for layer in layers))
        return run(*args, **kwargs)

    model._model = noting


def used(worker: Any) -> tuple[list[Counter[str]], Counter[str]]:
    """What forwards of blends used, and what the layers use now."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    model = get_kv_transfer_group().executor._blend_pass.setting.model
    now = Counter(layer._forward_method.__name__ for layer, _, _ in model._kernels._layers)
    return model.used, now
