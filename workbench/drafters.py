"""An EAGLE head of random weights, for a small model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def build_eagle_head(model: Path, folder: Path, *, seed: int = 0) -> Path:
    """Write a head for the model in `model`, of one layer, into `folder`, and return `folder`.

    Words and the last layer are the model's own. It guesses nothing right: what is asked is whether
    drafts that a head makes change an answer.
    """
    config = json.loads((model / "config.json").read_text())
    wide, kept = config["hidden_size"], ("vocab_size", "max_position_embeddings", "rope_parameters")
    head = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": wide,
        "intermediate_size": 2 * wide,
        "num_hidden_layers": 1,
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        **{name: config[name] for name in kept},
    }
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (wide, 2 * wide),
        "layers.0.self_attn.q_proj": (queries, wide),
        "layers.0.self_attn.k_proj": (keys, wide),
        "layers.0.self_attn.v_proj": (keys, wide),
        "layers.0.self_attn.o_proj": (wide, queries),
        "layers.0.mlp.gate_proj": (2 * wide, wide),
        "layers.0.mlp.up_proj": (2 * wide, wide),
        "layers.0.mlp.down_proj": (wide, 2 * wide),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * wide**-0.5
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(wide)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head))
    save_file(weights, folder / "model.safetensors")
    return folder
