"""Long contexts and other questions about them, for `benchmarks/paraphrases.py` and its test."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import numpy as np
from make_corpus import KINDS, RELATIONS, Document, Fact, make_documents

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine

NAMESPACE = "paraphrases"
SEED = 100  # of the first documents: not those of `examples/corpus`
DOCUMENTS = 3
SAMPLING = {"temperature": 0.0, "max_tokens": 4}
REUSED_TARGET = 0.9
PARAPHRASE, OTHER = "paraphrase", "other"

# The wording that the reader understands best of those that it was not taught.
OTHER_WORDS = {
    "start": "when began {name} ?",
    "place": "where is the {name} {kind} based ?",
    "lead": "who leads the {name} {kind} ?",
    "fund": "who funds the {name} {kind} ?",
    "topic": "on what does {name} work ?",
    "size": "how many members are in {name} ?",
    "color": "which color is the logo of {name} ?",
    "mascot": "which mascot does the {name} {kind} have ?",
}


@dataclass(frozen=True)
class Pair:
    """A prompt whose context is that of a stored one.

    Attributes:
        kind: `paraphrase` or `other`.
        stored: the stored prompt.
        asked: the new one.
        answer: the right word.
    """

    kind: str
    stored: str
    asked: str
    answer: str


def make_pairs(contexts: int, seed: int = SEED) -> list[Pair]:
    """Two pairs of each context: one paraphrase, one other question."""
    pairs: list[Pair] = []
    while len(pairs) < 2 * contexts:
        rng = random.Random(seed)
        documents = make_documents(seed)
        for kind in KINDS:
            chosen = rng.sample([one for one in documents if one.kind == kind], DOCUMENTS)
            pairs += _pairs(rng, chosen)
        seed += 1
    return pairs[: 2 * contexts]


def _pairs(rng: random.Random, documents: Sequence[Document]) -> list[Pair]:
    context = " ".join(" ".join(document.text.split()) for document in documents)
    first, second = rng.sample(list(documents), 2)

    def prompt(question: str) -> str:
        return f"{context} Question : {question} Answer :"

    one, other = _fact(rng, first), _fact(rng, second)
    stored = prompt(RELATIONS[one.relation].question.format(first.name))
    asked = OTHER_WORDS[one.relation].format(name=first.name, kind=first.kind)
    another = RELATIONS[other.relation].question.format(second.name)
    return [
        Pair(PARAPHRASE, stored, prompt(asked), one.value),
        Pair(OTHER, stored, prompt(another), other.value),
    ]


def _fact(rng: random.Random, document: Document) -> Fact:
    sentences = [sentence for part in document.paragraphs for sentence in part]
    return rng.choice([sentence.fact for sentence in sentences if sentence.fact is not None])


@dataclass(frozen=True)
class Outcome:
    """Both answers to a pair's new prompt."""

    pair: Pair
    aligned: Completion
    full: Completion

    def is_right(self, answer: Completion) -> bool:
        return answer.text.split()[:1] == [self.pair.answer]

    @property
    def reused(self) -> float:
        """Share of the prompt's tokens whose KV was not computed, but for what was recomputed."""
        report = self.aligned.report
        return (report.exact_tokens + report.reused_tokens) / report.prompt_tokens


def ask(engine: Engine, pairs: Sequence[Pair], namespace: str = NAMESPACE) -> list[Outcome]:
    """Store the stored prompts, then answer each new one both ways, nothing out of the prefix cache."""
    for stored in dict.fromkeys(pair.stored for pair in pairs):
        engine.observe(stored, namespace=namespace)
    outcomes = []
    for pair in pairs:
        answers = []
        for reuse in (ReuseOptions(namespace=namespace), ReuseOptions(enabled=False)):
            engine.reset_prefix_cache()
            answers.append(engine.generate(pair.asked, sampling=SAMPLING, reuse=reuse))
        outcomes.append(Outcome(pair, *answers))
    return outcomes


def evaluate(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of pairs of one kind."""
    reports = [one.aligned.report for one in outcomes]
    tiers = [report.served_by or "no tier: found by its tokens" for report in reports]
    reused = [one.reused for one in outcomes]
    return {
        "pairs": len(outcomes),
        "accuracy_full": _share(one.is_right(one.full) for one in outcomes),
        "accuracy_aligned": _share(one.is_right(one.aligned) for one in outcomes),
        "same_answer": _share(one.aligned.text == one.full.text for one in outcomes),
        "served_by": {tier: _share(one == tier for one in tiers) for tier in sorted(set(tiers))},
        "prompt_tokens": round(float(np.mean([one.prompt_tokens for one in reports])), 1),
        "reused": {
            "mean": round(float(np.mean(reused)), 4),
            "min": round(min(reused), 4),
            "share_from_90_percent": _share(share >= REUSED_TARGET for share in reused),
        },
        "recomputed_tokens": round(float(np.mean([one.recomputed_tokens for one in reports])), 2),
    }


def _share(hits: Any) -> float:
    return round(float(np.mean(list(hits))), 4)
