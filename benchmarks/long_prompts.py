"""Time to first token of long prompts: plain vLLM's prefill against blends, from files and from memory.

For a GPU, where a prompt has to be long before its prefill takes long. Without `--model` the model has
the shape of an 8B one (Llama 3.1's, with SmolLM2's vocabulary) and random weights: what is computed is
the same, and nothing has to be fetched; its answers mean nothing. One engine answers all ways in turn,
round by round, each with a question of its own, and vLLM's prefix cache is emptied before each.

plain             full prefill, reuse switched off for the request
files             the default preset, chunks read from files in the page cache
memory            the same, chunks in the RAM tier
as stored         out of the RAM tier, and nothing of the chunks computed: loading and the rest

Of each: the time to the first token, how long the KV took to be in the cache (`load_ms`), and the share
of a prefill that was computed.

    python benchmarks/long_prompts.py [--model FOLDER] [--lengths 4096,8192,16384,32768] [--repeats 3]

Writes build/bench/long_prompts.json and long_prompts.png. Three minutes on a GPU, with an 8B model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save, summary
from workbench.inside import inside

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` take the RAM tier away

CHUNK, TEXT, QUESTION = 512, 16, 32
NAMESPACE = "long"
WAYS = ("plain", "files", "memory", "as stored")
EIGHT_B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ram-bytes", type=int, default=6 << 30)
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="semkv-bench-") as scratch:
        engine_args: dict[str, Any] = {"max_model_len": max(lengths) + 64}
        model = given.model
        if model is None:
            model = eight_b(Path(scratch) / "8b")
            engine_args |= {"load_format": "dummy", "max_num_batched_tokens": 8192}
        with Engine(
            model, store=Path(scratch) / "store", ram_bytes=given.ram_bytes, **engine_args
        ) as engine:
            if not engine.gate.servable:
                sys.exit(f"not served with reuse: {engine.gate.reason}")
            about = engine.probe("about")[0]
            rows = measured(engine, lengths, given.repeats)
    shape = None if given.model is not None else EIGHT_B
    name = "8B's shape, random weights" if given.model is None else str(given.model)
    save(
        "long_prompts",
        {"model": name, "shape": shape, "about": about, "rows": rows},
        partial(draw, rows),
    )
    print(json.dumps(rows, indent=2))


def eight_b(folder: Path) -> Path:
    """A model's folder without weights, with SmolLM2's tokenizer."""
    shutil.copytree(
        ROOT / "build" / "smollm2", folder, ignore=shutil.ignore_patterns("*.safetensors")
    )
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **EIGHT_B}))
    return folder


def measured(engine: Engine, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each length and way."""
    size = len(engine.tokenizer)

    def tokens(seed: int, count: int) -> list[int]:
        return random_tokens(seed, count, size - 64)

    chunks = [tokens(1 + number, CHUNK) for number in range(max(lengths) // CHUNK)]
    store_chunks(engine, chunks, namespace=NAMESPACE)
    asked, rows = 10_000, []
    for length in lengths:
        of_ways: dict[str, list[Completion]] = {way: [] for way in WAYS}
        for repeat in range(1 + repeats):  # the first one warms up
            for way in WAYS:
                asked += 1
                prompt = tokens(9_000, TEXT)
                for chunk in chunks[: length // CHUNK]:
                    prompt = prompt + chunk
                inside(engine, remember if way != "files" else forget)
                answer = engine.generate(
                    prompt + tokens(asked, QUESTION),
                    sampling={"temperature": 0.0, "max_tokens": 1},
                    reuse=options(way),
                )
                engine.reset_prefix_cache()
                if repeat:
                    of_ways[way].append(answer)
        for way, answers in of_ways.items():
            reports = [one.report for one in answers]
            rows.append(
                {
                    "tokens": reports[0].prompt_tokens,
                    "way": way,
                    "ttft_ms": summary([one.ttft_ms for one in answers]),
                    "load_ms": summary([one.load_ms for one in reports]),
                    "charged_ratio": reports[-1].charged_ratio,
                    "reused_tokens": reports[-1].reused_tokens,
                    "reason": reports[-1].reason,
                }
            )
    return rows


def options(way: str) -> ReuseOptions:
    if way == "plain":
        return ReuseOptions(enabled=False)
    if way == "as stored":
        return ReuseOptions(ratio=0.0, namespace=NAMESPACE)
    return ReuseOptions(namespace=NAMESPACE)


def forget(worker: Any) -> None:
    """Have the worker load from files."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    executor = get_kv_transfer_group().executor
    if not hasattr(executor, "was"):
        executor.was = executor._files.memory
    object.__setattr__(executor._files, "memory", None)


def remember(worker: Any) -> None:
    """Give the worker its RAM tier back."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    executor = get_kv_transfer_group().executor
    if hasattr(executor, "was"):
        object.__setattr__(executor._files, "memory", executor.was)


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    for way in WAYS:
        points = [(row["tokens"], row["ttft_ms"]["median"]) for row in rows if row["way"] == way]
        axes.plot(*zip(*points, strict=True), marker="o", label=way)
    axes.set(xlabel="prompt, tokens", ylabel="time to first token, ms", ylim=(0, None))
    axes.legend()


if __name__ == "__main__":
    main()
