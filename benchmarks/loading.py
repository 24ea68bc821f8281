"""How fast stored chunks are loaded: from the RAM tier and from files, against copying and reading alone.

Six chunks are loaded, one prompt's. They are chunks of SmolLM2, of 500 tokens, and of the shape of an 8B
model: 36 layers, 8 KV heads of 128, 512 tokens, in bfloat16. Everything runs in a vLLM worker, in the
thread that loads blends; the ways take turns, round by round, and each ratio is of one round.

Warm, the files in the page cache:

copied            all layers, verified, from the tier or from files, to memory of whoever asks; against
                  copying as many bytes from memory to memory, a chunk at a time (`memcpy`). Beside it
                  stands the copying of as many bytes in pieces, each layer's K and V, as a blend has them
to cache          written to vLLM's paged cache, all of what a blend does but moving keys; against vLLM's
                  kernel alone, which writes as many K and V that are there (`kernel`). On a CPU it
                  packs keys for the attention's kernel, so that it is slower than copying
to cache, moved   with the keys moved, which is a product with a matrix

Cold, the files dropped from the page cache (`posix_fadvise`, made sure of with `mincore`; what a disk or
a hypervisor keeps is not dropped):

plain read        the files one behind the other, each by one read, into memory that was used before
into ram          read and verified into the tier, layer by layer, as a blend asks for them
files             the same without the tier
…, moved          all of what a blend does: without the tier, into it, and while another thread reads
                  ahead into it

    python benchmarks/loading.py [--rounds 15] [--model FOLDER]

Writes build/bench/loading.json and loading.png. Five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkHeader, chunk_id, write_chunk
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save, summary
from workbench.inside import inside
from workbench.loading import Chunks, random_kv
from workbench.tiny_models import build_tiny_model

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` measure in the worker

COUNT = 6
EIGHT_B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
BASES = {"copied": "memcpy", "to cache": "kernel", "moved": "kernel"}
"""What a warm way is compared with, by the end of its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="where the stores are made: on the disk that is measured"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        figures = {
            "chunks": COUNT,
            "SmolLM2": measure(arguments.model, folder / "smollm2", 500, arguments.rounds),
            "8B": measure(eight_b(folder), folder / "8b", 512, arguments.rounds, made=True),
        }
    path = save("loading", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def eight_b(folder: Path) -> Path:
    """A model with the KV of an 8B one, and little else."""
    path = build_tiny_model("qwen3", folder / "model")
    config = {**json.loads((path / "config.json").read_text()), **EIGHT_B}
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    return path


def measure(
    model: Path, store: Path, tokens: int, rounds: int, *, made: bool = False
) -> dict[str, Any]:
    """A model's figures.

    Args:
        made: whether weights and KV are random.
    """
    engine_args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": COUNT * tokens + 256,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
        **({"load_format": "dummy"} if made else {}),
    }
    with Engine(str(model), store=store, **engine_args) as engine:
        assert engine.gate.servable, engine.gate.reason
        chunks = (random_chunks if made else stored_chunks)(engine, tokens)

        def run(worker: Any) -> dict[str, Any]:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            from workbench.loading import Loading

            loading = Loading(get_kv_transfer_group().executor, chunks)
            cold = loading.cold(rounds)
            return {"bytes": loading.kv_bytes, "warm": loading.warm(rounds), "cold": cold}

        engine.reset_prefix_cache()
        taken = inside(engine, run)
    figures = {
        "chunk_tokens": tokens,
        "bytes": taken["bytes"],
        "warm": told(taken["bytes"], taken["warm"], warm=True),
        "cold": told(taken["bytes"], taken["cold"], warm=False),
    }
    print(json.dumps(figures, indent=2), flush=True)
    return figures


def stored_chunks(engine: Engine, tokens: int) -> Chunks:
    """Chunks of random tokens that the model computes."""
    vocabulary = min(len(engine.tokenizer), 1000)
    made = [random_tokens(seed, tokens, vocabulary) for seed in range(COUNT)]
    stored = store_chunks(
        engine, made, namespace="default", reference=random_tokens(COUNT, tokens, vocabulary)
    )
    assert engine.store is not None
    ids = [one.id for one in stored]
    paths = [engine.store.path(engine.fingerprint, "default", one) for one in ids]
    return Chunks(engine.fingerprint, "default", ids, paths, tokens)


def random_chunks(engine: Engine, tokens: int) -> Chunks:
    """Chunks of random KV."""

    def shapes(worker: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return list(get_kv_transfer_group().executor._files.shapes)

    layers = inside(engine, shapes)
    assert engine.store is not None
    ids, paths = [], []
    for seed in range(COUNT):
        own, left = token_array(random_tokens(seed, tokens)), token_array([])
        identity = chunk_id(engine.fingerprint, "default", left, own)
        path = engine.store.path(engine.fingerprint, "default", identity)
        header = ChunkHeader(
            id=identity,
            model=engine.fingerprint,
            namespace="default",
            kind="document",
            tokens=own,
            context=left,
            dtype="bfloat16",
            layers=len(layers),
        )
        codes = torch.randint(0, 256, (len(layers), tokens), dtype=torch.uint8)
        write_chunk(path, header, random_kv(layers, tokens, torch.bfloat16), codes)
        ids.append(identity)
        paths.append(path)
    return Chunks(engine.fingerprint, "default", ids, paths, tokens)


def told(size: int, took: Mapping[str, list[float]], *, warm: bool) -> dict[str, Any]:
    """Each way's speed, and its ratio to what it is compared with."""
    figures = {}
    for name, seconds in took.items():
        base = "plain read"
        if warm:
            base = next((base for end, base in BASES.items() if name.endswith(end)), "memcpy")
        ratios = [own / one for own, one in zip(took[base], seconds, strict=True)]
        figures[name] = {
            "ms": summary([1000 * one for one in seconds]),
            "gb_per_s": round(size / float(np.median(seconds)) / 1e9, 3),
            "of": base,
            "ratio": summary(ratios),
        }
    return figures


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """The ratios, with their spread, and the target."""
    axes = figure.subplots(1, 2)
    for axis, part in zip(axes, ("warm", "cold"), strict=True):
        ways = [name for name, one in figures["8B"][part].items() if one["of"] != name]
        for index, shape in enumerate(("SmolLM2", "8B")):
            ratios = [figures[shape][part][way]["ratio"] for way in ways]
            places = np.arange(len(ways)) + 0.4 * index - 0.2
            medians = [one["median"] for one in ratios]
            axis.barh(places, medians, 0.38, label=shape)
            axis.hlines(places, [r["min"] for r in ratios], [r["max"] for r in ratios], "k")
        axis.set_yticks(range(len(ways)), ways)
        axis.invert_yaxis()
        axis.axvline(0.8, color="gray", linestyle=":")
        axis.set_title(f"{part}: speed / " + ("memcpy" if part == "warm" else "plain read"))
    axes[0].legend()


if __name__ == "__main__":
    main()
