"""Tiny random models that load in transformers and in vLLM, for tests and benchmarks.

No pretrained model is needed: what the tests ask is whether two ways to compute give the same
numbers, and random weights answer that. The weights are larger than those a training starts from,
so that attention is peaked and another context gives visibly other keys and values.

`python -m workbench.tiny_models ARCH FOLDER` builds one by hand.
"""

from __future__ import annotations

import copy
import itertools
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WEIGHT_STD = 0.08  # of a model 128 wide; wider ones get less, so that activations are alike
VOCABULARY = 512
MAX_POSITIONS = 2048
WINDOW = 32  # tokens, of layers with a sliding window
IMAGE_SIZE = 56  # pixels, both ways
PATCH_SIZE = 14
IMAGE_TOKEN = VOCABULARY
BLIP2_QUERIES = 6
_QWEN_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_IDEFICS3_MARKS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

# Head size 32 and two query heads per KV head, unless an architecture says otherwise.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}


def _llama() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return transformers.LlamaConfig(**SHAPE, **TOKENS, rope_parameters=rope)


def _qwen3() -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**SHAPE, **TOKENS, head_dim=32)


def _qwen2_yarn() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return transformers.Qwen2Config(**SHAPE, **TOKENS, rope_parameters=rope)


def _qwen2_moe() -> transformers.PretrainedConfig:
    return transformers.Qwen2MoeConfig(
        **SHAPE,
        **TOKENS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    )


def _gemma2() -> transformers.PretrainedConfig:
    # Every second layer is a sliding one by name; a window this long never cuts anything.
    return transformers.Gemma2Config(
        **SHAPE, **TOKENS, head_dim=32, query_pre_attn_scalar=32, sliding_window=2 * MAX_POSITIONS
    )


def _gptj() -> transformers.PretrainedConfig:
    return transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=4,
        n_head=4,
        rotary_dim=16,
        n_positions=MAX_POSITIONS,
        **TOKENS,
    )


def _olmo2() -> transformers.PretrainedConfig:
    return transformers.Olmo2Config(**SHAPE, **TOKENS)


def _glm() -> transformers.PretrainedConfig:
    return transformers.GlmConfig(**SHAPE, **TOKENS, head_dim=32, partial_rotary_factor=0.5)


def _phi() -> transformers.PretrainedConfig:
    return transformers.PhiConfig(**SHAPE, **TOKENS, partial_rotary_factor=0.5)


# Multi-head latent attention: one compressed entry per token, no K and V per head. vLLM's CPU kernel is
# written for DeepSeek's own entry of 512 + 64. YaRN is DeepSeek's, with both its factors; without it vLLM
# 0.32 turns queries wrongly on a CPU.
_LATENTS: dict[str, Any] = {
    **SHAPE,
    **TOKENS,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}


def _deepseek_v2() -> transformers.PretrainedConfig:
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
    return transformers.DeepseekV2Config(**copy.deepcopy(_LATENTS), **experts)


def _deepseek_v3() -> transformers.PretrainedConfig:
    # Other experts: chosen by group, with a bias of their own. Kimi K2 is of this class. The last two are
    # in the models' own configurations, and vLLM reads them.
    experts = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    experts |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return transformers.DeepseekV3Config(**copy.deepcopy(_LATENTS), **experts)


def _deepseek_unscaled() -> transformers.PretrainedConfig:
    config = _deepseek_v2()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return config


def _deepseek_sparse() -> transformers.PretrainedConfig:
    # What DeepSeek V3.2 has beside V3's latents, for vLLM: an indexer. Its configuration alone is read.
    config = _deepseek_v2()
    config.index_topk = 64
    return config


def _gemma2_sliding() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **SHAPE, **TOKENS, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW
    )


def _gemma3_sliding() -> transformers.PretrainedConfig:
    # Layers with a window turn their keys by another base than those without.
    return transformers.Gemma3TextConfig(
        **SHAPE,
        **TOKENS,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        # In four groups of vLLM's hybrid KV cache manager, whose layers share one tensor.
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    )


def _gpt_oss() -> transformers.PretrainedConfig:
    # An attention sink for each head, and a window in every other layer.
    return transformers.GptOssConfig(
        **SHAPE,
        **TOKENS,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
    )


def _mistral_sliding() -> transformers.PretrainedConfig:
    # A window in all layers.
    return transformers.MistralConfig(**SHAPE, **TOKENS, sliding_window=WINDOW)


def _paddleocr_vl() -> transformers.PretrainedConfig:
    # Positions of three rows (M-RoPE): an image's tokens stand on a grid. The only one of this kind
    # whose class in vLLM does without torchvision.
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    shape = SHAPE | {"vocab_size": IMAGE_TOKEN + 1, "head_dim": 32}
    return transformers.PaddleOCRVLConfig(
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
        vision_config=VISION,
        text_config={**shape, **TOKENS, "rope_parameters": rope, "tie_word_embeddings": False},
    )


def _qwen_vl(kind: Any, interleaved: bool = False, **vision: Any) -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    rope["mrope_interleaved"] = interleaved
    shape = SHAPE | {"vocab_size": IMAGE_TOKEN + len(_QWEN_MARKS), "head_dim": 32}
    config: transformers.PretrainedConfig = kind(
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
        vision_end_token_id=IMAGE_TOKEN + 3,
        tie_word_embeddings=False,
        vision_config={"depth": 2, "num_heads": 2, "patch_size": PATCH_SIZE, **vision},
        text_config={**shape, **TOKENS, "rope_parameters": rope, "tie_word_embeddings": False},
    )
    return config


def _qwen2_vl() -> transformers.PretrainedConfig:
    return _qwen_vl(transformers.Qwen2VLConfig, embed_dim=64, hidden_size=128)


def _qwen2_5_vl() -> transformers.PretrainedConfig:
    # A tower with windows: one token wide in the first of its layers.
    return _qwen_vl(
        transformers.Qwen2_5_VLConfig,
        hidden_size=64,
        intermediate_size=128,
        out_hidden_size=128,
        window_size=2 * PATCH_SIZE,
        fullatt_block_indexes=[1],
    )


def _qwen3_vl() -> transformers.PretrainedConfig:
    # What its tower's first layer gives goes into the language model's first one, too (DeepStack).
    return _qwen_vl(
        transformers.Qwen3VLConfig,
        interleaved=True,
        hidden_size=64,
        intermediate_size=128,
        out_hidden_size=128,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )


def _lfm2() -> transformers.PretrainedConfig:
    # Two layers of short convolutions, whose state sums up what came before, and two of attention. vLLM
    # reads the widths under the names that the models' own configurations have.
    widths = {"conv_dim": 128, "block_dim": 128, "block_multiple_of": 32}
    return transformers.Lfm2Config(
        **SHAPE,
        **TOKENS,
        **widths,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
    )


def _mamba2() -> transformers.PretrainedConfig:
    return transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=1,
        max_position_embeddings=MAX_POSITIONS,
        **TOKENS,
    )


def _gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4, n_positions=MAX_POSITIONS, **TOKENS
    )


def _mid() -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(
        vocab_size=1024,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=24,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        **TOKENS,
    )


SERVABLE: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen2_yarn": _qwen2_yarn,
    "qwen2_moe": _qwen2_moe,
    "gemma2": _gemma2,
    "gptj": _gptj,
    "olmo2": _olmo2,
    "glm": _glm,
    "phi": _phi,
}
"""Architectures whose KV can be reused."""

WINDOWED: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gemma2_sliding": _gemma2_sliding,
    "gemma3_sliding": _gemma3_sliding,
    "gpt_oss": _gpt_oss,
    "mistral_sliding": _mistral_sliding,
}
"""Those with sliding windows, which are shorter than what the tests ask."""

LATENT: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""Those with multi-head latent attention."""

THREE_ROWS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "paddleocr_vl": _paddleocr_vl,
}
QWEN_VL: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
"""Those of Qwen, whose processors need torchvision."""

"""Those whose positions have three rows (M-RoPE)."""

UNSERVABLE: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt2": _gpt2,
    "deepseek_sparse": _deepseek_sparse,
    "deepseek_unscaled": _deepseek_unscaled,
    "lfm2": _lfm2,
    "mamba2": _mamba2,
}
"""Architectures that must run plain: learned absolute positions, sparse MLA, MLA without YaRN, recurrent
layers beside attention, and recurrent layers alone."""


def _llava() -> transformers.PretrainedConfig:
    # In vLLM with `model_impl="transformers"`: its own class wants torchvision.
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=64)
    text = transformers.LlamaConfig(**SHAPE | {"vocab_size": IMAGE_TOKEN + 1}, **TOKENS)
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )


def _idefics3() -> transformers.PretrainedConfig:
    # Vision transformer, patches merged by pixel shuffle, one linear projection.
    return transformers.Idefics3Config(
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=TOKENS["pad_token_id"],
        tie_word_embeddings=False,
        vision_config=VISION,
        text_config=_text_of_images(IMAGE_TOKEN + 1 + len(_IDEFICS3_MARKS)),
    )


def _blip2() -> transformers.PretrainedConfig:
    # Vision transformer, learned queries that attend to it, one linear projection.
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    shape = {"hidden_size": 64, "intermediate_size": 128, **layers}
    config = transformers.Blip2Config(
        num_query_tokens=BLIP2_QUERIES,
        image_token_index=IMAGE_TOKEN,
        vision_config={**shape, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE},
        qformer_config={
            **shape,
            "vocab_size": IMAGE_TOKEN + 1,
            "encoder_hidden_size": 64,
            "cross_attention_frequency": 2,
            "max_position_embeddings": 64,
        },
        text_config={**_text_of_images(IMAGE_TOKEN + 1), "tie_word_embeddings": False},
    )
    config.tie_word_embeddings = False
    return config


def _text_of_images(vocabulary: int) -> dict[str, Any]:
    """The language model behind a vision tower that vLLM loads by its own class."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SHAPE,
        **TOKENS,
        "vocab_size": vocabulary,
    }


IMAGE_PROMPTS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "blip2": "",
    "paddleocr_vl": "<image>",
    **dict.fromkeys(QWEN_VL, _QWEN_IMAGE),
}
"""Architectures that take images, and what stands for one in a prompt's text."""

ARCHITECTURES = (
    SERVABLE
    | WINDOWED
    | LATENT
    | THREE_ROWS
    | QWEN_VL
    | UNSERVABLE
    | {"mid": _mid, "llava": _llava, "idefics3": _idefics3, "blip2": _blip2}
)


def build_tiny_model(arch: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a random model of `arch` and its tokenizer into `folder`, and return `folder`.

    The same `arch` and `seed` give the same weights: float32, but bfloat16 for `mid` (24 layers,
    0.15 B parameters, for benchmarks). The tokenizer is a byte-level BPE with `<eos>` = 0 and
    `<pad>` = 1; any id from 2 up is an ordinary token, but for those of `IMAGE_PROMPTS`, which have
    `<image>` and more from `IMAGE_TOKEN` up.

    Raises:
        KeyError: `arch` is not one of `ARCHITECTURES`.
    """
    config = ARCHITECTURES[arch]()
    text = config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    std = WEIGHT_STD * (SHAPE["hidden_size"] / text.hidden_size) ** 0.5
    kind: Any = transformers.AutoModelForCausalLM
    if arch in IMAGE_PROMPTS:
        kind = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some biases start at random
        model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            if name.endswith("sinks"):  # as far apart as logits are
                noise *= 2 / std
            # Norm weights and biases move a little off their start, so that leaving one out shows.
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    if arch == "mid":
        model = model.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if arch in IMAGE_PROMPTS:
        _PROCESSORS[arch]().save_pretrained(folder)
    else:
        _tokenizer(config).save_pretrained(folder)
    return folder


_TEXT = """
the store keeps the keys and values of each chunk layer by layer in one file and a question about
the colour of the car is answered from documents that were found for it every answer is short stands
somewhere in its context who owns this harbour where does that river end
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _tokenizer(
    config: transformers.PretrainedConfig, **options: Any
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with exactly the model's vocabulary.

    Its merges are built here, word by word from the left, because the library's trainer breaks ties
    differently in each process.
    """
    size = config.vocab_size
    pieces = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    words = [("\u0120", *word) for word in _TEXT.split()]  # U+0120 is a space in byte-level BPE
    for word in words + list(itertools.product(string.ascii_letters, repeat=2)):
        left = word[0]
        for right in word[1:]:
            if left + right not in vocabulary and len(vocabulary) < size:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=config.max_position_embeddings,
        **options,
    )


_IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _image_tokenizer(*marks: str) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer, with one more token that stands for an image, and further ones."""
    tokenizer = _tokenizer(_llama())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *marks]})
    return tokenizer


def _llava_processor() -> transformers.ProcessorMixin:
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(
            size={"shortest_edge": IMAGE_SIZE},
            crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        ),
        _image_tokenizer(),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_IMAGE_TEMPLATE,
    )


def _idefics3_processor() -> transformers.ProcessorMixin:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edge = {"longest_edge": IMAGE_SIZE}
    return transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size=edge, max_image_size=edge, do_image_splitting=False
        ),
        tokenizer=_image_tokenizer(*_IDEFICS3_MARKS),
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
        chat_template=_IMAGE_TEMPLATE,
    )


def _blip2_processor() -> transformers.ProcessorMixin:
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    return transformers.Blip2Processor(
        image_processor=BlipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer=_image_tokenizer(),
        num_query_tokens=BLIP2_QUERIES,
    )


def _paddleocr_vl_processor() -> transformers.ProcessorMixin:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    return transformers.PaddleOCRVLProcessor(
        PaddleOCRVLImageProcessorPil(
            size={"shortest_edge": IMAGE_SIZE**2 // 4, "longest_edge": IMAGE_SIZE**2},
            patch_size=PATCH_SIZE,
        ),
        _tokenizer(_llama(), extra_special_tokens={"image_token": "<image>"}),
        chat_template=_IMAGE_TEMPLATE,
    )


def _qwen_vl_processor(kind: Any) -> transformers.ProcessorMixin:
    tokenizer = _tokenizer(_llama())
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_MARKS)})
    size = {"shortest_edge": IMAGE_SIZE**2 // 4, "longest_edge": IMAGE_SIZE**2}
    processor: transformers.ProcessorMixin = kind(
        transformers.Qwen2VLImageProcessor(size=size, patch_size=PATCH_SIZE),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(size=size, patch_size=PATCH_SIZE),
        chat_template=_IMAGE_TEMPLATE.replace("<image>", _QWEN_IMAGE),
    )
    return processor


_PROCESSORS: dict[str, Callable[[], transformers.ProcessorMixin]] = {
    "llava": _llava_processor,
    "idefics3": _idefics3_processor,
    "blip2": _blip2_processor,
    "paddleocr_vl": _paddleocr_vl_processor,
    "qwen2_vl": lambda: _qwen_vl_processor(transformers.Qwen2VLProcessor),
    "qwen2_5_vl": lambda: _qwen_vl_processor(transformers.Qwen2_5_VLProcessor),
    "qwen3_vl": lambda: _qwen_vl_processor(transformers.Qwen3VLProcessor),
}


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ARCHITECTURES:
        sys.exit(
            "usage: python -m workbench.tiny_models ARCH FOLDER\n"
            f"ARCH is one of {', '.join(ARCHITECTURES)}"
        )
    build_tiny_model(sys.argv[1], Path(sys.argv[2]))
