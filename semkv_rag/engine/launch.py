"""How vLLM is started with our connector: one place for the engine in a process and for the server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.fingerprint import config_fingerprint
from semkv_rag.engine.model_view import config_obstacle
from semkv_rag.errors import EngineError, OptionError

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 4 << 30
WORKER = "semkv_rag.engine.worker.SemKVWorker"


def transfer_config(
    root: Path, *, index_url: str | None, reuse: ReuseOptions, request_namespace: bool
) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig` that load our connector.

    Args:
        root: the store's folder.
        request_namespace: whether requests may name their namespace; see `connector`.
    """
    return {
        "kv_connector": "SemKVConnector",
        "kv_connector_module_path": "semkv_rag.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "root": str(root.resolve()),
            "index_url": index_url,
            "reuse": reuse.to_mapping(),
            "request_namespace": request_namespace,
        },
    }


def resolve(
    model: str, engine_args: Mapping[str, Any], transfer: Mapping[str, Any] | None
) -> tuple[VllmConfig, str | None]:
    """vLLM's configuration for a model.

    Args:
        engine_args: fields of vLLM's `AsyncEngineArgs`.
        transfer: from `transfer_config`, or None for plain vLLM.

    Returns:
        The configuration, and why the model is answered without reuse, or None. Some
        configurations do not start with any KV connector; those get none.

    Raises:
        OptionError: an engine argument is unknown or has an impossible value.
        EngineError: vLLM does not accept the model.
    """
    if transfer is None:
        return _configuration(model, engine_args), "no store was given"
    connected = {"kv_transfer_config": KVTransferConfig(**transfer), "worker_cls": WORKER}
    config = _configuration(model, {**engine_args, **connected})
    obstacle = config_obstacle(config)
    if obstacle is None:
        return config, None
    logger.warning("semkv: this model is answered without reuse: %s", obstacle)
    return _configuration(model, engine_args), obstacle


def _configuration(model: str, engine_args: Mapping[str, Any]) -> VllmConfig:
    arguments = dict(engine_args)
    if current_platform.is_cpu():
        # Compiling takes longer than it saves there.
        arguments.setdefault("enforce_eager", True)
        # Left alone, vLLM takes 92 % of the machine's memory and fails when that is not free.
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    try:
        return AsyncEngineArgs(model=model, **arguments).create_engine_config()
    except TypeError as error:
        raise OptionError(f"vLLM has no such engine argument: {error}") from error
    except (ValueError, OSError, RuntimeError) as error:
        raise EngineError(f"vLLM cannot load {model}: {error}") from error


def model_fingerprint(model: str, **engine_args: Any) -> str:
    """The fingerprint that an engine with these arguments would have, without starting one.

    Args:
        engine_args: fields of vLLM's `AsyncEngineArgs`, as they are given to `Engine`.

    Raises:
        OptionError: an engine argument is unknown.
        EngineError: vLLM cannot load the model, or its files are not on this machine.
    """
    return config_fingerprint(_configuration(model, engine_args))
