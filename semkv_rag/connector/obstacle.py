"""What is known before a model is loaded: whether its configuration can be served with reuse."""

from __future__ import annotations

from vllm.config import VllmConfig

DRAFTS = ("ngram", "suffix", "medusa", "draft_model", "eagle", "eagle3", "mtp")
"""vLLM's ways to draft that read no KV of the served model: see `worker.model.draft_kv`."""


def config_obstacle(config: VllmConfig) -> str | None:
    """Why a configuration cannot be served with reuse, in words, or None.

    The worker's `model_layers` and gate find what shows only once the model is loaded.
    """
    model, parallel = config.model_config, config.parallel_config
    drafts, lora = config.speculative_config, config.lora_config
    obstacles = {
        "its MLA is sparse: an indexer picks what each token attends to": (
            model.use_mla and hasattr(model.hf_text_config, "index_topk")
        ),
        "its MLA keeps latents in 8 bits": (
            model.use_mla and config.cache_config.cache_dtype.startswith("fp8")
        ),
        "it has recurrent layers beside attention (hybrid cache)": model.is_hybrid,
        "all its layers are recurrent": model.is_attention_free,
        "it is an encoder-decoder": model.is_encoder_decoder,
        "it is a pooling model": model.runner_type == "pooling",
        "decode context parallel is on": parallel.decode_context_parallel_size > 1,
        # Its experts wait for all ranks in each forward, and ranks blend at times of their own.
        "it has experts that are spread over data parallel ranks": (
            parallel.data_parallel_size > 1 and model.is_moe
        ),
        # Their features change with the adapter, and an image's name does not tell which it was.
        "LoRA of the vision tower is on": (lora is not None and lora.enable_tower_connector_lora),
        "LoRA adapters of two layouts are on": (
            lora is not None and lora.enable_mixed_moe_lora_format
        ),
        f"speculative decoding is on with {drafts and drafts.method}": (
            drafts is not None and drafts.method not in DRAFTS
        ),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def unblended_images(config: VllmConfig) -> str | None:
    """Why no blend computes the rows of images, in words, or None."""
    options = config.model_config.multimodal_config
    if options is None:
        return None
    obstacles = {
        "vLLM hands images on in shared memory": options.mm_processor_cache_type == "shm",
        "vLLM leaves out tokens of videos": options.is_multimodal_pruning_enabled(),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)
