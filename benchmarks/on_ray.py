"""Two engines with a core each on Ray, against one engine with both cores.

    python -m benchmarks.on_ray MODEL DOCUMENTS… --pairs 3

Runs `semkv precompute` as a user does, with and without `--ray`, in turn, each into an empty store.
Reported are the seconds of splitting and computing, without the engines' start, and those of the whole.
Writes build/bench/on_ray.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Ray's processes give way to all others otherwise, and one engine's do not.
ENVIRONMENT = {"RAY_worker_niceness": str(os.nice(0)), "HF_HUB_OFFLINE": "1"}
KEPT = ("tokens", "computing_seconds", "seconds")


def run(
    model: str, documents: list[str], engine_args: list[str], *, on_ray: bool
) -> dict[str, Any]:
    """One run into an empty store; its result."""
    with TemporaryDirectory() as store:
        command = [
            *(sys.executable, "-m", "semkv_rag.cli", "precompute", *documents, "--model", model),
            *("--store", store, "--json", *(["--ray"] if on_ray else [])),
            *(word for argument in engine_args for word in ("--engine-arg", argument)),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ENVIRONMENT
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Two engines on Ray against one.")
    parser.add_argument("model")
    parser.add_argument("documents", nargs="+")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=["dtype=bfloat16", f"kv_cache_memory_bytes={1 << 30}"],
    )
    given = parser.parse_args()
    pairs = []
    for number in range(given.pairs):
        pair = {}
        for on_ray in (False, True) if number % 2 == 0 else (True, False):
            result = run(given.model, given.documents, given.engine_arg, on_ray=on_ray)
            pair["ray" if on_ray else "one"] = {name: result[name] for name in KEPT}
            print(
                f"{'ray' if on_ray else 'one'}: {result['tokens']:,} tokens in"
                f" {result['computing_seconds']:.1f} s, {result['seconds']:.1f} s with the start",
                flush=True,
            )
        pairs.append(pair)
    ratios = [one["ray"]["computing_seconds"] / one["one"]["computing_seconds"] for one in pairs]
    whole = [one["ray"]["seconds"] / one["one"]["seconds"] for one in pairs]
    for name, values in (("computing", ratios), ("with the start", whole)):
        print(
            f"ray / one, {name}: {statistics.median(values):.2f}"
            f" ({min(values):.2f} to {max(values):.2f}, {len(values)} pairs)"
        )
    # Not above: it sets a variable that would take a core from the engines that are started there.
    from workbench.figures import save

    path = save(
        "on_ray",
        {"model": Path(given.model).name, "documents": len(given.documents), "pairs": pairs},
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
