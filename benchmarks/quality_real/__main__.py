"""How close reuse comes on a real model: what chunks are stored behind, which tokens are computed again.

    python -m benchmarks.quality_real MODEL [--contexts 105] [--passages 4] [--tokens 192]

MODEL is a Hugging Face folder of Llama's, Qwen2's or Qwen3's kind (`make model` makes one). The tasks are
RULER's family and the questions on `examples/articles`, half of them with passages in document order,
half as a retriever orders them; or, with `--data FILE`, records of MuSiQue's form. In plain PyTorch,
one prompt at a time; all that a way computes is counted as its charge.

For long contexts, `--set long` leaves out what costs another full prefill, and `--shared` asks one
question of each of four families on the same passages, which must be at least 12.

Writes build/bench/quality_real_<model>.json after each context, from which a stopped run goes on, and a
plot at the end. About 15 seconds a context of 800 tokens on two cores for a model of 0.5 billion
parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.quality_real import tasks
from benchmarks.quality_real.compared import SETS, WAYS, outcomes
from benchmarks.quality_real.context import Context
from benchmarks.quality_real.network import Network
from benchmarks.quality_real.report import draw, table
from benchmarks.quality_real.shelf import Shelf
from semkv_rag.reuse.question import MOST
from workbench.figures import OUTPUT, save
from workbench.results_study import BASE

ARTICLES = ROOT / "examples" / "articles"
BEFORE = (
    "I have been reading these passages for a while, on the train and again this morning, and I took"
    " some notes. Most of what they say is clear to me, and some of it I knew before. A colleague asked"
    " me about one detail that I could not find again in my notes, and I do not want to go through all"
    " of the text once more. Please look it up for me, and tell me only what the text itself says. "
)
"""Talk before a question, as people write it."""
BEHIND = (
    "\nAnswer in one short sentence of plain English. Use only the passages above, do not guess, and say"
    " that you do not know when they do not tell. Do not repeat the question, and give no explanation"
    " beyond it."
)
"""Instructions behind one."""
TALK = {"before": (BEFORE, ""), "behind": ("", BEHIND)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--contexts", type=int, default=105)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192, help="of each passage, at most")
    parser.add_argument("--family", action="append", help="only these; may be given several times")
    parser.add_argument(
        "--shared", action="store_true", help="a question of each family on each context"
    )
    parser.add_argument("--order", choices=("retrieved", "document"), help="both, if left out")
    parser.add_argument("--set", choices=tuple(SETS), default="study", help="which ways")
    parser.add_argument(
        "--way", action="append", choices=tuple(WAYS), help="only these, and plain reuse"
    )
    parser.add_argument("--data", type=Path, help="records of MuSiQue's form instead")
    parser.add_argument("--overlap", type=int, default=0, help="tokens that neighbours share")
    parser.add_argument(
        "--chunks-before",
        type=int,
        help="of its document, that a chunk is stored behind; what precompute does, if left out",
    )
    parser.add_argument(
        "--long-question",
        choices=tuple(TALK),
        help="with a hundred tokens of talk before it, or forty of instructions behind it",
    )
    parser.add_argument(
        "--question-tokens", type=int, default=MOST, help="that are asked with, at most"
    )
    parser.add_argument("--name", help="of the output; the model's, if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="float32 is several times sooner on a CPU without bfloat16 instructions",
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    network = Network(arguments.model, getattr(torch, arguments.dtype))
    shelf = Shelf(network, shared=arguments.shared)
    ways = (BASE, *arguments.way) if arguments.way else SETS[arguments.set]
    name = f"quality_real_{arguments.name or network.name}"
    kept = OUTPUT / f"{name}.json"
    about = {
        "model": network.name,
        "passages": arguments.passages,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "families": arguments.family,
        "order": arguments.order,
        "set": arguments.set,
        "shared": arguments.shared or None,
        "only": arguments.way,
        "overlap": arguments.overlap or None,
        "chunks_before": arguments.chunks_before,
        "long_question": arguments.long_question,
        "question_tokens": arguments.question_tokens,
        "data": None if arguments.data is None else arguments.data.name,
        "dtype": arguments.dtype,
    }
    rows: list[dict[str, Any]] = []
    if kept.exists():
        before = json.loads(kept.read_text())
        rows = before["contexts"] if all(before.get(k) == v for k, v in about.items()) else []
    made = tasks.Maker(
        ARTICLES,
        network.tokenizer,
        arguments.tokens,
        arguments.seed,
        arguments.family,
        arguments.data,
        arguments.order,
        shared=arguments.shared,
        overlap=arguments.overlap,
        chunks_before=arguments.chunks_before,
        talk=TALK.get(arguments.long_question, ("", "")),
    )
    began = time.monotonic()
    for number in range(len({row["context"] for row in rows}), arguments.contexts):
        for task in made.tasks(number, arguments.passages):
            context = partial(Context, network, task, shelf, arguments.question_tokens)
            rows.append({"context": number, **measure(context, ways)})
        save(name, {**about, "contexts": rows})
        done = number + 1
        print(f"{done} of {arguments.contexts}, {time.monotonic() - began:.0f} s", flush=True)
    figures = {**about, "ways": table(rows), "contexts": rows}
    path = save(name, figures, lambda figure: draw(figure, rows))
    for line in figures["ways"]["all"]:
        print(line)
    print(f"written to {path.relative_to(ROOT)}")


@torch.inference_mode()
def measure(make: Callable[[], Context], ways: tuple[str, ...]) -> dict[str, Any]:
    """One context under some ways."""
    context = make()
    task, made = context.task, outcomes(context, ways)
    context.finish()
    return {
        "family": task.family,
        "order": task.order,
        "tokens": context.end,
        "question_tokens": len(context.question),
        "full": task.score(context.full_text),
        "bare": task.score(context.bare_text()),
        "full_text": context.full_text,
        "wanted": task.wanted,
        "ways": {name: asdict(outcome) for name, outcome in made.items()},
    }


if __name__ == "__main__":
    main()
