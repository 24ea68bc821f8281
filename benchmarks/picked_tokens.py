"""What a token that a blend computes takes, beside one of plain prefill: attention, and all else.

Prompts are made as those of `ttft.py`. Clocks in the worker stand around each forward and around each
layer's attention, and the keys that a token attends to are counted; plain prefill and blends take turns.
A token of plain prefill attends to as many keys as its chunk of the prompt lets it; the tokens of a blend
stand where the selector picked them. So attention is said per key, everything else per token. What the
picked tokens would take at plain prefill's speed per key and per token is what the backend's kernels
allow; `of_allowed` is that over what they take.

    python benchmarks/picked_tokens.py [--lengths 2048,4096,7680] [--ratio 0.15] [--repeats 3]

Writes build/bench/picked_tokens.json and picked_tokens.png. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.articles import article_pieces
from workbench.chunks import store_chunks
from workbench.figures import save, summary
from workbench.inside import inside

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` put clocks into the worker

CHUNK = 512
QUESTION = "\n\nQuestion: what do these passages have in common?\nAnswer:"
LEAST_TOKENS = 64
"""Of a forward that counts: smaller ones are the question's and the first token's."""


@dataclass(frozen=True)
class Forward:
    """One of the model's forwards.

    Attributes:
        keys: what its tokens attend to, added up, in one layer.
        attention_s: of all layers.
    """

    tokens: int
    keys: int
    attention_s: float
    whole_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="2048,4096,7680")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(
            str(arguments.model),
            store=Path(folder) / "store",
            dtype="bfloat16",
            max_model_len=max(lengths) + 128,
            kv_cache_memory_bytes=1 << 30,
            seed=0,
        ) as engine,
    ):
        pieces = article_pieces(engine.tokenizer, max(lengths) // CHUNK + 1, CHUNK)
        chunks = store_chunks(engine, pieces[:-1], namespace="default", reference=pieces[-1])
        question = engine.tokenizer.encode(QUESTION, add_special_tokens=False)
        inside(engine, put_clocks)
        rows = []
        for length in lengths:
            order = list(range(length // CHUNK))
            random.Random(length).shuffle(order)
            prompt = [t for index in order for t in chunks[index].tokens] + question
            rows.append(compared(engine, prompt, arguments.ratio, arguments.repeats))
            print(rows[-1], flush=True)
    figures = {
        "model": arguments.model.name,
        "dtype": "bfloat16",
        "chunk_tokens": CHUNK,
        "ratio": arguments.ratio,
        "repeats": arguments.repeats,
        "lengths": rows,
    }
    path = save("picked_tokens", figures, lambda figure: draw(figure, rows))
    print(f"written to {path.relative_to(ROOT)}")


def compared(engine: Engine, prompt: list[int], ratio: float, repeats: int) -> dict[str, Any]:
    """Plain prefill and a blend of one prompt, in turns; the first of each warms up."""
    ways = {
        "plain": ReuseOptions(enabled=False),
        "picked": ReuseOptions(ratio=ratio, selector="sensitivity_attention"),
    }
    seen: dict[str, list[Forward]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, options in ways.items():
            engine.reset_prefix_cache()
            engine.generate(prompt, sampling={"max_tokens": 1, "temperature": 0}, reuse=options)
            forwards = [Forward(*one) for one in inside(engine, take_forwards)]
            if repeat:
                large = [one for one in forwards if one.tokens >= LEAST_TOKENS]
                seen[way].append(added(large))
    per_key = {way: [one.attention_s / one.keys for one in seen[way]] for way in ways}
    per_token = {
        way: [(one.whole_s - one.attention_s) / one.tokens for one in seen[way]] for way in ways
    }
    allowed = [
        (key * picked.keys + token * picked.tokens) / picked.whole_s
        for key, token, picked in zip(
            per_key["plain"], per_token["plain"], seen["picked"], strict=True
        )
    ]
    return {
        "prompt_tokens": len(prompt),
        **{
            way: {
                "tokens": seen[way][0].tokens,
                "keys": seen[way][0].keys,
                "attention_share": summary([one.attention_s / one.whole_s for one in seen[way]]),
                "whole_ms": summary([one.whole_s * 1000 for one in seen[way]]),
                "ns_per_key": summary([value * 1e9 for value in per_key[way]]),
                "us_per_token_else": summary([value * 1e6 for value in per_token[way]]),
            }
            for way in ways
        },
        "key_ratio": summary(ratios(per_key)),
        "token_ratio": summary(ratios(per_token)),
        "of_allowed": summary(allowed),
    }


def added(forwards: Sequence[Forward]) -> Forward:
    return Forward(
        sum(one.tokens for one in forwards),
        sum(one.keys for one in forwards),
        sum(one.attention_s for one in forwards),
        sum(one.whole_s for one in forwards),
    )


def ratios(values: dict[str, list[float]]) -> list[float]:
    """Of picked over plain, round by round."""
    return [a / b for a, b in zip(values["picked"], values["plain"], strict=True)]


def put_clocks(worker: Any) -> None:
    """Time every forward of the worker's model, and each layer's attention in it."""
    import time

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    executor = get_kv_transfer_group().executor
    model = executor._blend_pass.setting.model
    executor.forwards, state = [], {"attention": 0.0, "tokens": 0, "keys": 0, "began": 0.0}

    def clocked(impl: Any) -> None:
        forward = impl.forward

        def timed(layer: Any, query: Any, key: Any, value: Any, cache: Any, about: Any, *rest: Any,
                  **named: Any) -> Any:  # fmt: skip
            began = time.perf_counter()
            result = forward(layer, query, key, value, cache, about, *rest, **named)
            state["attention"] += time.perf_counter() - began
            if about is not None:
                starts = about.query_start_loc
                counts = (starts[1:] - starts[:-1]).long()
                ends = about.seq_lens[: len(counts)].long()
                state["tokens"] = int(counts.sum())
                state["keys"] = int((counts * ends - counts * (counts - 1) // 2).sum())
            return result

        impl.forward = timed

    for layer in model.layers:
        clocked(layer.attention.impl)

    def begin(*_: Any) -> None:
        state.update(attention=0.0, tokens=0, keys=0, began=time.perf_counter())

    def end(*_: Any) -> None:
        took = time.perf_counter() - state["began"]
        executor.forwards.append((state["tokens"], state["keys"], state["attention"], took))

    model._model.register_forward_pre_hook(begin)
    model._model.register_forward_hook(end, always_call=True)


def take_forwards(worker: Any) -> list[tuple[int, int, float, float]]:
    """Those since the last call."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    executor = get_kv_transfer_group().executor
    taken, executor.forwards = executor.forwards, []
    return list(taken)


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    axis = figure.subplots()
    lengths = [row["prompt_tokens"] for row in rows]
    for name, label in (
        ("key_ratio", "attention, per key"),
        ("token_ratio", "all else, per token"),
    ):
        axis.plot(lengths, [row[name]["median"] for row in rows], marker="o", label=label)
    axis.set(xlabel="prompt tokens", ylabel="picked / plain", title="What a picked token takes")
    axis.set_ylim(bottom=0)
    axis.legend()


if __name__ == "__main__":
    main()
