"""How the question's attention should become one score of a token: layers, pooling, neighbours.

    python -m workbench.quality.pooling [--models FOLDER ...] [--contexts 24]

For each way to pool: of the cross questions, the per cent whose answer's own tokens that matter are all
among the m highest scores. (Those are up to two tokens of the fact that is asked about. What it refers to
in its turn is not counted: the question has no reason to attend to that.) Nothing is blended, so that it
takes a minute.

Writes build/bench/quality_pooling.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semkv_rag.blend import smoothed
from workbench.figures import save
from workbench.quality.export import MODELS, load
from workbench.quality.network import Model
from workbench.quality.passes import Seen, cache_of, read
from workbench.quality.precomputed import Stored, precompute
from workbench.quality.questions import Questions, make_contexts, single

FOUND = (4, 6, 8, 12, 24)
Pool = Callable[[Tensor, Tensor], Tensor]
"""Takes weights [layers, heads, question, candidates], and norms of stored values [layers, candidates];
gives [candidates]."""

POOLS: dict[str, Pool] = {
    "mean over heads, tokens, layers": lambda w, _: w.mean((0, 1, 2)),
    "the same, without the first layer": lambda w, _: w[1:].mean((0, 1, 2)),
    "the same, the later half of the layers": lambda w, _: w[len(w) // 2 :].mean((0, 1, 2)),
    "the same, the last token alone": lambda w, _: w[1:, :, -1].mean((0, 1)),
    "root mean square over heads and tokens": lambda w, _: (
        w[1:].square().mean((1, 2)).sqrt().mean(0)
    ),
    "highest head": lambda w, _: w[1:].amax(1).mean((0, 1)),
    "highest head and token": lambda w, _: w[1:].amax((1, 2)).mean(0),
    "highest layer": lambda w, _: w[1:].mean((1, 2)).amax(0),
    "highest of all": lambda w, _: w[1:].amax((0, 1, 2)),
    "mean, each layer's highest made 1": lambda w, _: _levelled(w[1:].mean((1, 2))).mean(0),
    "mean, times the value's norm": lambda w, n: (w[1:].mean((1, 2)) * n[1:]).mean(0),
}
"""All but the first and the third leave the first layer out."""


def _levelled(scores: Tensor) -> Tensor:
    return scores / scores.amax(-1, keepdim=True)


@torch.no_grad()
def weights(model: Model, questions: Questions, stored: Stored) -> list[Tensor]:
    """For each prompt, the softmax of each layer, head and question token over the candidates and the
    question itself: [layers, heads, question, candidates]."""
    rows, prompts, _ = questions.tokens.shape
    length, seen = questions.length, Seen()
    cache = cache_of(stored.kv, prompts * length)
    asked = questions.tokens[:, :, :length]
    read(model, cache, questions.contexts.lengths, asked, seen=seen)
    later = torch.full((length, length), -torch.inf).triu(1)
    found = []
    for row in range(rows):
        at = stored.candidates(row)
        for prompt in range(prompts):
            own = slice(prompt * length, (prompt + 1) * length)
            by_layer = []
            for query, key, (keys, _) in zip(seen.queries, seen.keys, stored.kv, strict=True):
                mine = query[row, :, own] * query.shape[-1] ** -0.5
                logits = torch.cat(
                    (mine @ keys[row][:, at].mT, mine @ key[row, :, own].mT + later), -1
                )
                by_layer.append(logits.softmax(-1)[..., : len(at)])
            found.append(torch.stack(by_layer))
    return found


def measure(model: Model, contexts: int, seed: int = 5) -> dict[str, list[float]]:
    """By way to pool: per cent of questions whose tokens are found among the `FOUND` highest."""
    questions = single(make_contexts(seed, contexts), seed, 6, 0)
    stored = precompute(model, questions.contexts, "alone")
    ranks: dict[str, list[int]] = {}
    facts = [fact for each in questions.facts for fact in each]
    for index, (fact, given) in enumerate(
        zip(facts, weights(model, questions, stored), strict=True)
    ):
        row = index // questions.tokens.shape[1]
        at, places = stored.candidates(row), stored.ranks(row)
        needed = [c.position for c in fact.carriers if c.cross]
        norms = torch.stack([values[row][:, at].norm(dim=-1).mean(0) for _, values in stored.kv])
        for name, pool in POOLS.items():
            scores = pool(given, norms)
            for way, final in ((name, scores), (f"{name}, smoothed", smoothed(scores, places))):
                order = at[torch.sort(final, descending=True, stable=True).indices].tolist()
                ranks.setdefault(way, []).append(max(order.index(place) for place in needed))
    return {
        way: [100 * sum(rank < most for rank in each) / len(each) for most in FOUND]
        for way, each in ranks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=24)
    given = parser.parse_args()
    results = {folder.name: measure(load(folder), given.contexts) for folder in given.models}
    print(f"{'found among the highest ' + ' / '.join(map(str, FOUND)):52s}" + "  ".join(results))
    for way in next(iter(results.values())):
        told = ["/".join(f"{share:.0f}" for share in by[way]) for by in results.values()]
        print(f"{way:52s}" + "  ".join(told))
    print(save("quality_pooling", {"found among": FOUND, "models": results}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
