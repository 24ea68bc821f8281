"""LoRA adapters of random weights for the tiny models, and models with an adapter merged in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STD = 0.2
"""Of both factors: as large beside a tiny model's weights that answers are clearly others."""


def build_adapter(model: Path, folder: Path, *, seed: int, rank: int = 4) -> Path:
    """Write an adapter for all projections of a model into `folder`, in PEFT's format.

    Args:
        model: a folder that `build_tiny_model` made.
    """
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1000 + seed)
    factors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in MODULES:
            rows, columns = weight.shape
            for which, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                noise = torch.randn(shape, generator=generator) * STD
                factors[f"base_model.model.{module}.{which}.weight"] = noise
    assert factors, f"{model} has none of {MODULES}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the model with the adapter's products added to its weights into `folder`."""
    weights = load_file(model / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        change = factors[name.replace("lora_A", "lora_B")] @ factors[name]
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + change
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
