"""Where things are, and how tests start engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READER = ROOT / "examples" / "reader"
"""The reader: a small model that was trained for the examples and tests."""

# Small enough that several engines fit beside each other, large enough that nothing is preempted.
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 32,
    "seed": 0,
}

# vLLM's kernels for AMX take no float32.
ARGS_OF_MODEL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"attention_backend": "CPU_MLA"},
    "deepseek_v3": {"attention_backend": "CPU_MLA"},
    "deepseek_unscaled": {"attention_backend": "CPU_MLA"},
}
"""By a small model's name."""
