"""What selecting costs beside the arithmetic that it asks for, by selector.

One engine on 24 layers of random weights, one prompt of 512-token chunks in an order of their own. Of
each blend it is taken how long the choice itself took (comparing, scoring, sorting, cutting the layers'
arguments and telling attention who is left), and how long the pass of the question took without that.
Nothing comes from vLLM's prefix cache.

    python benchmarks/selector_cost.py [--tokens 4096] [--repeats 7] [--ratio 0.15]

Writes build/bench/selectors.json and selectors.png. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ttft import CHUNK, QUESTION, TEXT, build_model
from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from semkv_rag.selectors import SELECTORS
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save, summary
from workbench.inside import inside

CHOOSING = [name for name in SELECTORS if name not in ("none", "all")]

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` put clocks into the worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ratio", type=float, default=0.15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments)
    path = save("selectors", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    engine_args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": arguments.tokens + 128,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    rows: dict[str, dict[str, list[float]]] = {}
    charged: dict[str, float] = {}
    with Engine(str(build_model(folder / "mid")), store=folder / "store", **engine_args) as engine:
        vocabulary = min(len(engine.tokenizer), 1000)
        tokens = [
            random_tokens(seed, CHUNK, vocabulary) for seed in range(arguments.tokens // CHUNK)
        ]
        chunks = store_chunks(engine, tokens, namespace="default")
        random.Random(arguments.tokens).shuffle(chunks)
        prompt = random_tokens(100_002, TEXT, vocabulary)
        prompt += [token for chunk in chunks for token in chunk.tokens]
        prompt += random_tokens(100_001, QUESTION, vocabulary)
        inside(engine, put_clocks)
        for repeat in range(arguments.repeats + 1):  # the first warms up
            order = list(CHOOSING)
            random.Random(repeat).shuffle(order)
            for selector in order:
                engine.reset_prefix_cache()
                inside(engine, forget_picks)
                report = engine.generate(
                    prompt,
                    sampling={"max_tokens": 1, "temperature": 0},
                    reuse=ReuseOptions(selector=selector, ratio=arguments.ratio),
                ).report
                assert report.reused_tokens == len(chunks) * CHUNK
                charged[selector] = report.charged_ratio
                if repeat:
                    selecting, weighing, asking = inside(engine, read_clocks)
                    row = rows.setdefault(selector, {})
                    for name, value in (
                        ("blend_ms", report.blend_ms),
                        ("selecting_ms", selecting + weighing),
                        ("asking_ms", asking - weighing),
                        ("selecting_share", (selecting + weighing) / report.blend_ms),
                    ):
                        row.setdefault(name, []).append(value)
    selectors = {
        name: {
            "charged_ratio": charged[name],
            **{key: summary(values) for key, values in rows[name].items()},
        }
        for name in CHOOSING
    }
    for name, row in selectors.items():
        print(
            f"{name:24} charged {row['charged_ratio']:.3f}, blend {row['blend_ms']['median']:7.0f} ms, "
            f"selecting {row['selecting_ms']['median']:6.1f} ms "
            f"({row['selecting_share']['median']:.1%}), asking {row['asking_ms']['median']:6.1f} ms"
        )
    return {
        "prompt_tokens": len(prompt),
        "ratio": arguments.ratio,
        "repeats": arguments.repeats,
        "selectors": selectors,
    }


def put_clocks(worker: Any) -> None:
    """Time what chooses, and the passes of questions; called in the engine's worker."""
    import time
    from collections.abc import Callable

    from semkv_rag.connector.worker.blend import question_pass
    from semkv_rag.connector.worker.blend.blend_run import BlendRun

    worker.semkv_clocks = {"selecting": 0.0, "weighing": 0.0, "asking": 0.0}

    def timed(clock: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                worker.semkv_clocks[clock] += (time.perf_counter() - began) * 1000

        return run

    for name in ("_select", "_narrow", "_see", "_picked_blindly"):
        setattr(BlendRun, name, timed("selecting", getattr(BlendRun, name)))
    question_pass.squared_attention = timed("weighing", question_pass.squared_attention)
    question_pass.QuestionPass.run = timed("asking", question_pass.QuestionPass.run)


def read_clocks(worker: Any) -> tuple[float, float, float]:
    """Milliseconds of choosing, of attention weights, and of asking with these in it."""
    clocks = worker.semkv_clocks
    return clocks["selecting"], clocks["weighing"], clocks["asking"]


def forget_picks(worker: Any) -> None:
    """Have the next blend choose anew; and the clocks at zero."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().executor._blend_pass.picked.clear()
    worker.semkv_clocks = dict.fromkeys(worker.semkv_clocks, 0.0)


def draw(figure: Any, figures: dict[str, Any]) -> None:
    """Each selector's blend, the choice in it apart."""
    axes = figure.subplots()
    names = list(figures["selectors"])
    left = [0.0] * len(names)
    for key, label in (("selecting_ms", "the choice"), ("asking_ms", "the question's pass")):
        widths = [figures["selectors"][name][key]["median"] for name in names]
        axes.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [
        figures["selectors"][name]["blend_ms"]["median"] - done
        for name, done in zip(names, left, strict=True)
    ]
    axes.barh(names, rest, left=left, label="the rest of the blend")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{figures['prompt_tokens']} prompt tokens, ratio {figures['ratio']:.0%}")
    axes.legend()


if __name__ == "__main__":
    main()
