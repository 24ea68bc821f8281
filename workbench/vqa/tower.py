"""Counts how often a model's vision tower runs: a hook on the module itself, in vLLM's worker.

The functions are sent to the worker (`collective_rpc`), so the process that sends them needs
`VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
"""

from __future__ import annotations

from typing import Any

TOWER_NAMES = (
    "vision_tower",
    "vision_model",
    "visual",
    "vision_encoder",
    "vision_backbone",
    "vision_embed_tokens",
)


def watch_tower(worker: Any, name: str | None = None) -> str:
    """Count the vision tower's forward calls from now on; once per worker.

    Args:
        name: of the module, where it cannot be found: the tail of its path in the model.

    Returns:
        The module's path, or an empty text where there is none of such a name.
    """
    model = worker.get_model()
    names = {name} if name else set(TOWER_NAMES)
    if not name:  # what vLLM itself marks as a tower
        marked = getattr(model, "_tower_model_names", [])
        names |= {path.rpartition(".")[2] for path in marked}
    found = [
        (path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in names
    ]
    if not found:
        return ""
    path, tower = min(found, key=lambda entry: entry[0].count("."))  # the outermost

    def count(*_: Any) -> None:
        worker.tower_calls += 1

    worker.tower_calls = 0
    tower.register_forward_pre_hook(count)
    return path


def tower_calls(worker: Any) -> int:
    """The calls since `watch_tower`; a call may take several images of one step."""
    return int(worker.tower_calls)
