"""What drafts for a small model, with random weights: heads of EAGLE, EAGLE-3 and Medusa, and MTP.

They guess next to nothing right: what is asked is whether drafts change an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from workbench.tiny_models import build_tiny_model

SEEN_LAYERS = (1, 3, 5)
"""Of the model's, those whose hidden states an EAGLE-3 head sees."""
MEDUSA_HEADS = 3


def build_eagle_head(model: Path, folder: Path) -> Path:
    """Write a head for the model in `model`, of one layer, into `folder`, and return `folder`.

    Words and the last layer are the model's own.
    """
    config = _head_config(model)
    wide = config["hidden_size"]
    shapes = {"fc": (wide, 2 * wide), **_layer("layers.0", config, wide)}
    return _write(folder, config, shapes, {"layers.0.post_attention_layernorm": wide})


def build_eagle3_head(model: Path, folder: Path) -> Path:
    """Write an EAGLE-3 head for the model in `model`, of one layer, into `folder`, and return `folder`.

    It sees hidden states of three layers; words are the model's own.
    """
    config = {
        **_head_config(model),
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": list(SEEN_LAYERS),
        "num_aux_hidden_states": len(SEEN_LAYERS),
    }
    wide = config["hidden_size"]
    shapes = {
        "fc": (wide, len(SEEN_LAYERS) * wide),
        "lm_head": (config["vocab_size"], wide),
        **_layer("midlayer", config, 2 * wide),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return _write(
        folder, config, shapes, {"norm": wide, **{f"midlayer.{name}": wide for name in norms}}
    )


def build_medusa_heads(model: Path, folder: Path) -> Path:
    """Write Medusa's heads for the model in `model` into `folder`, and return `folder`."""
    of_model = json.loads((model / "config.json").read_text())
    wide, words = of_model["hidden_size"], of_model["vocab_size"]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": wide,
        "vocab_size": words,
        "num_heads": MEDUSA_HEADS,
        "num_hidden_layers": 1,
    }
    shapes = {f"blocks.{head}.layers.0": (wide, wide) for head in range(MEDUSA_HEADS)}
    shapes |= {f"lm_heads.{head}": (words, wide) for head in range(MEDUSA_HEADS)}
    return _write(folder, config, shapes, {})


def build_mtp_model(folder: Path) -> Path:
    """Write a random model of MiMo's kind, with a layer that predicts one token more, into `folder`."""
    build_tiny_model("qwen2_yarn", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    wide, name = config["hidden_size"], "model.mtp_layers.0"
    shapes = {f"{name}.input_proj": (wide, 2 * wide), **_layer(name, config, wide)}
    norms = ("token", "hidden", "input", "post_attention", "final")
    kept = load_file(folder / "model.safetensors")
    of_norms = {f"{name}.{norm}_layernorm": wide for norm in norms}
    projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
    biases = {f"{one}.bias": torch.zeros(shapes[one][0]) for one in projections}
    return _write(folder, config, shapes, of_norms, kept | biases)


def _head_config(model: Path) -> dict[str, Any]:
    """Of a head that is one layer of Llama's kind, as wide as the model."""
    config = json.loads((model / "config.json").read_text())
    kept = ("vocab_size", "max_position_embeddings", "rope_parameters", "hidden_size")
    shape = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 2 * config["hidden_size"],
        "num_hidden_layers": 1,
        **{name: config[name] for name in kept + shape},
    }


def _layer(name: str, config: Mapping[str, Any], seen: int) -> dict[str, tuple[int, int]]:
    """The shapes of a layer's matrices, by name; its attention sees `seen` numbers of a token."""
    wide, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", wide // config["num_attention_heads"])
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    return {
        f"{name}.self_attn.q_proj": (queries, seen),
        f"{name}.self_attn.k_proj": (keys, seen),
        f"{name}.self_attn.v_proj": (keys, seen),
        f"{name}.self_attn.o_proj": (wide, queries),
        f"{name}.mlp.gate_proj": (inner, wide),
        f"{name}.mlp.up_proj": (inner, wide),
        f"{name}.mlp.down_proj": (wide, inner),
    }


def _write(
    folder: Path,
    config: Mapping[str, Any],
    matrices: Mapping[str, tuple[int, int]],
    norms: Mapping[str, int],
    others: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a configuration, random matrices, norms of ones, and `others` as they are."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in matrices.items()
    }
    weights |= {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**(others or {}), **weights}, folder / "model.safetensors")
    return folder
