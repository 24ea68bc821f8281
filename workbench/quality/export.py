"""Models as folders that vLLM and transformers load: Qwen3, float16, with a tokenizer of whole words.

python -m workbench.quality.export CHECKPOINT FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from workbench.quality import words
from workbench.quality.network import Model, Shape

MODELS = Path(__file__).resolve().parent / "models"
"""The trained family, one folder each."""


def export(model: Model, folder: Path) -> None:
    """Writes config, tokenizer and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": w.detach().half().contiguous() for name, w in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", _config(model.shape)),
        (
            "generation_config.json",
            {"eos_token_id": words.END_OF_ANSWER, "pad_token_id": words.PAD},
        ),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def load(folder: Path) -> Model:
    """A model as `export` wrote it, in float32."""
    weights = load_file(folder / "model.safetensors")
    model = Model(Shape())
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    return model


def from_checkpoint(path: Path) -> Model:
    """The model of a checkpoint that training left."""
    model = Model(Shape())
    model.load_state_dict(torch.load(path, weights_only=False)["model"])
    return model


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "dtype": "float16",
        "bos_token_id": None,
        "eos_token_id": words.END_OF_ANSWER,
        "pad_token_id": words.PAD,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": 1024,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
}


def _tokenizer() -> dict[str, object]:
    special = [words.PAD, words.END_OF_ANSWER, words.UNKNOWN]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": words.WORDS[token], **flags} for token in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words.WORDS)},
            "unk_token": "<unk>",
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    export(from_checkpoint(given.checkpoint), given.folder)
