"""Pictures, prompts with them, and the engine's vision tower, counted where it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.utils import is_torchvision_available

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.answers import SAMPLING
from workbench.inside import inside
from workbench.tiny_models import IMAGE_SIZE

of_qwen = (
    pytest.mark.soak,
    pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision: make qwen-vl"),
)
"""Marks of tests with Qwen's vision models."""

TOWERS = ("vision_model", "vision_tower", "visual")
PROJECTORS = ("connector", "language_projection", "multi_modal_projector", "mlp_AR", "merger")


def picture(seed: int, noise: int = 0) -> Image.Image:
    """Soft colours; with `noise`, a near-duplicate of the one without."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3)).astype("uint8"))
    pixels = np.asarray(coarse.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)).astype(
        int
    )
    drift = random.integers(-noise, noise + 1, pixels.shape)
    return Image.fromarray(np.clip(pixels + drift, 0, 255).astype("uint8"))


def about(
    text: str, *pictures: Image.Image, uuids: list[str] | None = None, mark: str = "<image>"
) -> dict[str, Any]:
    """A prompt whose `{}` are the pictures."""
    prompt: dict[str, Any] = {
        "prompt": text.format(*[mark] * len(pictures)),
        "multi_modal_data": {"image": list(pictures)},
    }
    return prompt if uuids is None else {**prompt, "multi_modal_uuids": {"image": uuids}}


def ask(engine: Engine, prompt: Any, **options: Any) -> Completion:
    """The answer with reuse, under these `ReuseOptions`."""
    return engine.generate(prompt, sampling=SAMPLING, reuse=ReuseOptions(**options))


def plain(engine: Engine, prompt: Any) -> Completion:
    """The answer of plain vLLM: no reuse, and everything computed, the image's features too."""
    forget_features(engine)
    options = {**SAMPLING, "skip_reading_prefix_cache": True}
    return engine.generate(prompt, sampling=options, reuse=ReuseOptions(enabled=False))


def settle(engine: Engine) -> None:
    """Wait until all that was computed is stored."""
    assert engine._llm is not None and engine._llm.prompt_lookup is not None
    engine._llm.prompt_lookup.settle()


def forget_features(engine: Engine) -> None:
    """Empty vLLM's own cache of images' features, as if the process were new."""
    assert engine._llm is not None
    engine._loop.call(engine._llm.reset_encoder_cache())


def count_tower(engine: Engine) -> None:
    """Count the calls of the vision tower and of the projector from now on."""

    def hook(worker: Any) -> None:
        modules = dict(worker.model_runner.get_model().named_modules())
        worker.calls = {"tower": 0, "projector": 0}
        for what, names in (("tower", TOWERS), ("projector", PROJECTORS)):
            by_name = {path.rpartition(".")[2]: module for path, module in modules.items()}
            module = next(by_name[name] for name in names if name in by_name)

            def count(*_: Any, what: str = what) -> None:
                worker.calls[what] += 1

            module.register_forward_hook(count)

    inside(engine, hook)


def tower_runs(engine: Engine) -> int:
    """Calls of the vision tower since `count_tower`, in whatever number of calls of the projector: vLLM
    may project several images at once."""
    runs: int = inside(engine, lambda worker: worker.calls["tower"])
    return runs


def tower_calls(engine: Engine) -> int:
    """Calls of the vision tower since `count_tower`; the projector had as many."""
    calls: dict[str, int] = inside(engine, lambda worker: worker.calls)
    assert calls["tower"] == calls["projector"]
    return calls["tower"]
