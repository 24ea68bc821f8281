"""Engine arguments for which we have another default than vLLM, on a CPU: for `Engine` and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.launch import (
    CPU_BLOCK_TOKENS,
    CPU_KV_CACHE_BYTES,
    engine_arguments,
    platform_defaults,
    resolve,
    transfer_config,
)
from semkv_rag.server.serve import _default_arguments
from semkv_rag.store import place_of
from workbench.tiny_models import build_tiny_model

LATENT_BLOCK_TOKENS = 128 if torch.cpu._is_amx_tile_supported() else 16
"""vLLM's own choice for latents: its kernel without AMX has blocks of 16 alone."""

SIZED = ["--enforce-eager", "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]


def test_what_the_user_says_stands() -> None:
    assert platform_defaults([]) == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
    }
    assert platform_defaults(["enforce_eager", "gpu_memory_utilization"]) == {}
    assert list(platform_defaults(["num_gpu_blocks_override"])) == ["enforce_eager"]


def test_a_size_in_the_environment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert platform_defaults([]) == {"enforce_eager": True}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], SIZED),
        (["--port", "8001"], SIZED),
        (["--no-enforce-eager"], SIZED[1:]),
        (["--enforce-eager", "--kv_cache_memory_bytes=4G"], []),
        (["--gpu-memory-utilization", "0.3"], SIZED[:1]),
    ],
)
def test_the_server_gets_them_as_options(given: list[str], added: list[str]) -> None:
    assert _default_arguments(given) == added


@pytest.mark.parametrize(
    ("arch", "given", "tokens"),
    [
        ("llama", {}, CPU_BLOCK_TOKENS),
        ("llama", {"block_size": 64}, 64),
        ("deepseek_v2", {}, LATENT_BLOCK_TOKENS),
    ],
)
def test_blocks_are_small_unless_the_user_or_the_model_says_otherwise(
    tmp_path: Path, arch: str, given: dict[str, Any], tokens: int
) -> None:
    model = build_tiny_model(arch, tmp_path / arch)
    arguments = engine_arguments(str(model), given)
    transfer = transfer_config(
        place_of(tmp_path), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )
    config, obstacle = resolve(arguments, transfer)
    assert obstacle is None
    assert config.cache_config.block_size == tokens
    plain, _ = resolve(arguments, None)
    vllm_tokens = LATENT_BLOCK_TOKENS if arch == "deepseek_v2" else 128
    assert plain.cache_config.block_size == given.get("block_size", vllm_tokens)
