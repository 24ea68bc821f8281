"""vLLM's configuration with our connector: one place for the engine in a process and for the server."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import ECTransferConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.adapter import adapter_digest, adapter_model
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.connector.obstacle import config_obstacle
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.selectors import registered_selectors
from semkv_rag.store import StorePlace
from semkv_rag.store.codecs import PLAIN, codec_named

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 4 << 30
CPU_BLOCK_TOKENS = 32
"""vLLM has blocks of 128 there, and finds whole blocks alone: of what stands before a chunk, which was
computed just before, up to 127 tokens would be computed again. In blocks of 32 no kernel is slower."""
STATE_BYTES = 8 << 30
"""What the image features of one namespace may take on disk."""

WORKER = "semkv_rag.connector.worker_class.SemKVWorker"
EXECUTOR = "semkv_rag.connector.executor_class.SemKVExecutor"


def transfer_config(
    place: StorePlace,
    *,
    index_url: str | None,
    reuse: ReuseOptions,
    request_namespace: bool,
    ram_bytes: int = 0,
    codec: str = PLAIN,
) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig` that load our connector.

    Args:
        place: where the store is.
        request_namespace: whether requests may name their namespace; see `connector`.
        ram_bytes: what chunks may take in memory; 0 for none.
        codec: by which captured chunks are stored.

    Raises:
        OptionError: `ram_bytes` is no number of bytes that this machine has, or there is no such codec.
    """
    _check_ram(ram_bytes)
    codec_named(codec)
    return {
        "kv_connector": "SemKVConnector",
        "kv_connector_module_path": "semkv_rag.connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "place": replace(place, root=place.root.resolve()).to_mapping(),
            "index_url": index_url,
            "reuse": reuse.to_mapping(),
            "request_namespace": request_namespace,
            "ram_bytes": ram_bytes,
            "codec": codec,
            "selectors": registered_selectors(),
        },
    }


def _check_ram(ram_bytes: int) -> None:
    if isinstance(ram_bytes, bool) or not isinstance(ram_bytes, int) or ram_bytes < 0:
        raise OptionError(f"ram_bytes is {ram_bytes!r}: give a number of bytes, 0 for none")
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ram_bytes > there:
        raise OptionError(f"ram_bytes is {ram_bytes}: this machine has {there} bytes of memory")


def connect_images(config: VllmConfig, *, enable_mm_embeds: bool) -> None:
    """Have the features of images stored, where a model with our KV connector takes images.

    vLLM lets clients send embeddings in place of images as soon as a connector may load; whoever could
    do that could put what they like under an image's name. So that is put back as the user had it.

    Args:
        config: as vLLM made it; changed.
        enable_mm_embeds: what the user asked for.

    Raises:
        OptionError: an encoder-cache connector is configured already.
    """
    model = config.model_config
    if model.multimodal_config is None:
        return
    model.multimodal_config.enable_mm_embeds = enable_mm_embeds
    model.multimodal_config.allow_missing_mm_embeddings = False
    if config.ec_transfer_config is not None:
        raise OptionError("ec_transfer_config is set where a store is given: leave it out")
    if not takes_images(model):
        return
    store = config.kv_transfer_config.kv_connector_extra_config
    config.ec_transfer_config = ECTransferConfig(
        ec_connector="ImageFeatureConnector",
        ec_connector_module_path="semkv_rag.connector.images.connector",
        ec_role="ec_both",
        ec_connector_extra_config={
            "place": store["place"],
            "index_url": store["index_url"],
            "max_bytes": STATE_BYTES,
        },
    )


def resolve(
    arguments: AsyncEngineArgs,
    transfer: Mapping[str, Any] | None,
    usage: UsageContext = UsageContext.ENGINE_CONTEXT,
) -> tuple[VllmConfig, str | None]:
    """vLLM's configuration for a model.

    Args:
        transfer: from `transfer_config`, or None for plain vLLM.
        usage: what vLLM is started as.

    Returns:
        The configuration, and why the model is answered without reuse, or None. Some
        configurations do not start with any KV connector; those get none.

    Raises:
        OptionError: an encoder-cache connector is configured already.
        EngineError: vLLM does not accept the model.
    """
    if transfer is None:
        return _configuration(arguments, usage), "no store was given"
    connected = copy.copy(arguments)
    connected.kv_transfer_config = KVTransferConfig(**transfer)
    connected.worker_cls = WORKER
    config = _configuration(connected, usage)
    obstacle = config_obstacle(config)
    if obstacle is None:
        if current_platform.is_cpu():
            _suit_cpu(config)
        connect_images(config, enable_mm_embeds=arguments.enable_mm_embeds)
        return config, None
    logger.warning("semkv: this model is answered without reuse: %s", obstacle)
    return _configuration(arguments, usage), obstacle


def _suit_cpu(config: VllmConfig) -> None:
    """Change what vLLM chose for a CPU; what the user chose, or the model needs, stays."""
    parallel, cache = config.parallel_config, config.cache_config
    if parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = EXECUTOR
    # Not one of `platform_defaults`: vLLM would take it for the user's, and warn where it must not be.
    if not cache.user_specified_block_size and not config.model_config.use_mla:
        cache.block_size = CPU_BLOCK_TOKENS


def engine_arguments(model: str, given: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments for a model, with our defaults where nothing is given.

    Args:
        given: fields of vLLM's `AsyncEngineArgs`.

    Raises:
        OptionError: one is unknown.
        EngineError: one has an impossible value.
    """
    named = dict(given)
    if os.environ.get("TQDM_DISABLE"):  # vLLM does not look at it
        named.setdefault("use_tqdm_on_load", False)
    try:
        return AsyncEngineArgs(model=model, **named, **platform_defaults(named))
    except TypeError as error:
        raise OptionError(f"vLLM has no such engine argument: {error}") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise EngineError(f"vLLM cannot load {model}: {error}") from error


def _configuration(arguments: AsyncEngineArgs, usage: UsageContext) -> VllmConfig:
    try:
        return arguments.create_engine_config(usage_context=usage)
    except (ValueError, OSError, RuntimeError) as error:
        raise EngineError(f"vLLM cannot load {arguments.model}: {error}") from error


def platform_defaults(given: Collection[str]) -> dict[str, Any]:
    """vLLM's engine arguments for which we have another default than it, without those that are given.

    Args:
        given: names of the engine arguments that the user sets.
    """
    if not current_platform.is_cpu():
        return {}
    defaults: dict[str, Any] = {}
    if "enforce_eager" not in given:
        defaults["enforce_eager"] = True  # compiling takes longer than it saves there
    # Left alone, vLLM takes 92 % of the machine's memory and fails when that is not free.
    sizes = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
    if not sizes & set(given) and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    return defaults


def takes_images(config: ModelConfig) -> bool:
    """Whether a model's messages may hold images."""
    if not config.is_multimodal_model:
        return False
    limits = MULTIMODAL_REGISTRY.get_processing_info(config).allowed_mm_limits
    return bool(limits.get("image", 0))


def kv_bytes_per_token(config: VllmConfig, codec: str | None = None) -> int:
    """What one token's KV takes in chunk files, over all layers and ranks.

    Args:
        codec: by which they are stored; the one that the configuration says unless given.
    """
    model, parallel = config.model_config, config.parallel_config
    if codec is None:
        transfer = config.kv_transfer_config
        codec = PLAIN if transfer is None else transfer.get_from_extra_config("codec", PLAIN)
    keys, values = _kv_shapes(config)
    copies = int(parallel.tensor_parallel_size) * int(model.get_total_num_hidden_layers())
    if codec != PLAIN:
        return math.ceil(copies * codec_named(codec).bytes_per_token(keys, values, model.dtype))
    name = config.cache_config.cache_dtype
    dtype = model.dtype if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]
    return copies * (math.prod(keys) + math.prod(values)) * int(dtype.itemsize)


def _kv_shapes(config: VllmConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """`(kv_heads, head_dim)` of K and of V on each rank. A latent is on all of them."""
    model = config.model_config
    if model.use_mla:
        text = model.hf_text_config
        return (1, int(text.qk_rope_head_dim)), (1, int(text.kv_lora_rank))
    shape = (int(model.get_num_kv_heads(config.parallel_config)), int(model.get_head_size()))
    return shape, shape


def model_fingerprint(model: str, **engine_args: Any) -> str:
    """The fingerprint that an engine with these arguments would have, without starting one.

    Args:
        engine_args: fields of vLLM's `AsyncEngineArgs`, as they are given to `Engine`.

    Raises:
        OptionError: an engine argument is unknown.
        EngineError: vLLM cannot load the model, or its files are not on this machine.
    """
    config, _ = resolve(engine_arguments(model, engine_args), None)
    return config_fingerprint(config)


def adapter_fingerprint(model: str, path: str, **engine_args: Any) -> str:
    """What chunks of the model with a LoRA adapter are stored under, without starting an engine.

    Args:
        path: the adapter's folder.
        engine_args: as for `model_fingerprint`; `enable_lora` among them.

    Raises:
        OptionError: an engine argument is unknown, `enable_lora` is not among them, or the folder holds
            no adapter.
        EngineError: vLLM cannot load the model, or its files are not on this machine.
    """
    config, _ = resolve(engine_arguments(model, engine_args), None)
    return adapter_model(config_fingerprint(config), adapter_digest(path), config.lora_config)
