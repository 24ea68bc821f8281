"""Engine arguments for which we have another default than vLLM, on a CPU: for `Engine` and the server."""

from __future__ import annotations

import pytest

from semkv_rag.engine.launch import CPU_KV_CACHE_BYTES, platform_defaults
from semkv_rag.server.serve import _default_arguments

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
