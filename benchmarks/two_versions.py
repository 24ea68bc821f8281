"""What a change costs: an engine of another commit and one of this checkout, asked in turn.

Both run side by side, each with its own store, bound to the same cores; only one computes at a time.
Each prompt is made of 7 stored chunks of 256 tokens in a new order. It goes to both engines, and which of
them is asked first alternates. The ways: `plain` (no reuse), `none` (chunks as stored, no token
recomputed) and presets. The figures are the time to the first token, and the CPU time of all processes of
an engine; the ratio is this checkout's to the other's, prompt by prompt: a machine whose speed drifts
slows both.

    python benchmarks/two_versions.py COMMIT [--model FOLDER] [--ways none,balanced,plain] [--prompts 20]

Writes build/bench/two_versions.json and a plot. 20 minutes on two slow cores, most of them for `plain`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workbench.figures import save

PICKED, CHUNK_TOKENS, WARM_UPS = 7, 256, 3
WAYS = {
    "plain": {"enabled": False},
    "none": {"selector": "none"},
    "fast": {"preset": "fast"},
    "balanced": {"preset": "balanced"},
}


class Version:
    """The engine of one checkout, in processes of its own."""

    def __init__(self, checkout: Path, model: Path, store: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))
        computing = cores[:-1] or cores  # the last is for loading and for the processes that wait
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, computing)),
        }
        articles = str(ROOT / "examples" / "articles")
        told = [str(model), str(store), articles, str(PICKED), str(CHUNK_TOKENS)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "workbench" / "one_version.py"), *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        found = Path(self._line().strip())
        if checkout not in found.parents:
            raise RuntimeError(f"{found} was imported, not the package in {checkout}")

    def ask(self, seed: int, way: str) -> dict[str, float]:
        """Times of one prompt, ms, and its tokens.

        Raises:
            RuntimeError: tokens were reused where they should not be, or not; or the engine ended.
        """
        assert self.process.stdin is not None
        print(json.dumps({"seed": seed, "reuse": WAYS[way]}), file=self.process.stdin, flush=True)
        told: dict[str, float] = json.loads(self._line())
        if (told["reused_tokens"] > 0.5 * told["prompt_tokens"]) != (way != "plain"):
            raise RuntimeError(f"{way}: {told['reused_tokens']} tokens were reused")
        return told

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the engine ended; what it said stands above")
        return line

    def close(self) -> None:
        """End the engine and wait for it."""
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="what git can check out: a commit, branch or tag")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--ways", default="none,balanced,plain", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--prompts", type=int, default=20, help=f"of each way, after {WARM_UPS}")
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    try:
        commit = git("rev-parse", "--verify", f"{arguments.commit}^{{commit}}")
    except subprocess.CalledProcessError:
        parser.error(f"{arguments.commit} is no commit of this repository")
    rows = []
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        checkout = folder / "checkout"
        git("clone", "--quiet", "--no-checkout", str(ROOT), str(checkout))
        git("-C", str(checkout), "checkout", "--quiet", commit)
        versions = {}
        for name, place in (("other", checkout), ("this", ROOT)):
            versions[name] = Version(place, arguments.model, folder / name)
            ends.callback(versions[name].close)
        for way in ways:
            rows.append({"way": way, **compared(versions, way, arguments.prompts)})
            print({key: value for key, value in rows[-1].items() if key != "asked"}, flush=True)
    told = {"model": arguments.model.name, "chunk_tokens": CHUNK_TOKENS, "picked_chunks": PICKED}
    commits = {"other": commit, "this": git("describe", "--always", "--dirty", "--abbrev=40")}
    save("two_versions", {**told, **commits, "ways": rows}, lambda figure: draw(figure, rows))


def git(*words: str) -> str:
    """What git says."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def compared(versions: dict[str, Version], way: str, prompts: int) -> dict[str, Any]:
    """Medians of both, and this checkout's over the other's, of each prompt."""
    asked: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for seed in range(-WARM_UPS, prompts):
        for name in sorted(versions, reverse=seed % 2 == 1):
            told = versions[name].ask(seed, way)
            if seed >= 0:
                asked[name].append(told)
    figures: dict[str, Any] = {"prompt_tokens": asked["this"][0]["prompt_tokens"]}
    for what in ("ttft_ms", "cpu_ms"):
        each = {name: [row[what] for row in rows] for name, rows in asked.items()}
        pairs = zip(each["this"], each["other"], strict=True)
        low, middle, high = statistics.quantiles([mine / other for mine, other in pairs], n=4)
        figures[what] = {
            **{name: round(statistics.median(values), 1) for name, values in each.items()},
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
        }
    return {**figures, "asked": asked}


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """The ratios of the times to the first token, a box a way."""
    axes = figure.subplots()
    ratios = [
        [
            mine["ttft_ms"] / other["ttft_ms"]
            for mine, other in zip(row["asked"]["this"], row["asked"]["other"], strict=True)
        ]
        for row in rows
    ]
    axes.boxplot(ratios, tick_labels=[row["way"] for row in rows])
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_ylabel("time to first token: this checkout's over the other's")


if __name__ == "__main__":
    main()
