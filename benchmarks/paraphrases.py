"""A long context and another question: what `aligned` reuses of the stored prompt, and what it answers.

The reader reads three documents of one kind (about 150 tokens, which is what it can
read) and a question. A prompt with that context is stored; then the same context is asked

paraphrase  the stored question in other words
other       another question, about another of the documents

once with the tiers on, at the default recompute ratio, and once by full prefill. The semantic tier knows
the stored prompts of all contexts; where it finds none near enough, the KV is found by its tokens all the
same. Of the other wordings that the
model might understand, these are the ones it understands best; it was taught none of them, so it is
right less often, with and without reuse.

    python benchmarks/paraphrases.py [--contexts 240]

Writes build/bench/paraphrases.json and paraphrases.png. Ends with 1 when the accuracies differ by more
than a point, or less than 90 % of the prompts' tokens are reused. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.figures import save
from workbench.paraphrases import OTHER, PARAPHRASE, REUSED_TARGET, ask, evaluate, make_pairs

READER = ROOT / "examples" / "reader"
ACCURACY_TARGET = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts", type=int, default=240)
    pairs = make_pairs(parser.parse_args().contexts)
    with (
        tempfile.TemporaryDirectory() as store,
        Engine(
            str(READER),
            store=store,
            prompt_cache=PromptCacheOptions(capture=False),
            dtype="float32",
            kv_cache_memory_bytes=256 << 20,
        ) as engine,
    ):
        outcomes = ask(engine, pairs)
    results = {
        kind: evaluate([one for one in outcomes if one.pair.kind == kind])
        for kind in (PARAPHRASE, OTHER)
    }
    failed = False
    for kind, told in results.items():
        print(
            f"{kind:<10} {told['pairs']} pairs of {told['prompt_tokens']} tokens: right"
            f" {told['accuracy_aligned']:.1%} aligned, {told['accuracy_full']:.1%} full prefill;"
            f" same answer {told['same_answer']:.1%}; reused {told['reused']['mean']:.1%} of the"
            f" tokens (least {told['reused']['min']:.1%}); served by {told['served_by']}"
        )
        apart = abs(told["accuracy_aligned"] - told["accuracy_full"])
        failed |= apart > ACCURACY_TARGET or told["reused"]["mean"] < REUSED_TARGET
    print(save("paraphrases", {"results": results}, lambda figure: draw(figure, results)))
    if failed:
        sys.exit("the accuracies differ by more than a point, or too little was reused")


def draw(figure: Any, results: dict[str, Any]) -> None:
    axes = figure.subplots()
    names = {"full prefill": "accuracy_full", "aligned": "accuracy_aligned"}
    for number, (name, key) in enumerate(names.items()):
        places = [place + 0.4 * number for place in range(len(results))]
        axes.bar(places, [told[key] for told in results.values()], width=0.38, label=name)
    axes.set_xticks(
        [place + 0.2 for place in range(len(results))],
        [f"{kind}\n{told['reused']['mean']:.1%} reused" for kind, told in results.items()],
    )
    axes.set_ylabel("right answers")
    axes.legend(loc="lower right")


if __name__ == "__main__":
    main()
