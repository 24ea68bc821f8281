"""Contexts with a question whose answer is known: RULER's task family (arXiv 2404.06654), and articles.

A context is a list of passages, each with what stands before it in the document it was cut from. Needles
are put into the documents before they are cut, as facts stand in real ones.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.quality_real.haystack import Haystack, Passage, in_a_row
from benchmarks.quality_real.words import CITIES, WORDS


@dataclass(frozen=True)
class Task:
    """A context, a question, and what a right answer holds.

    Attributes:
        wanted: texts that the answer is to hold; the score is the share of them that it does.
        any_of: whether one of them is enough: they are ways to say the same.
    """

    family: str
    order: str
    passages: list[Passage]
    question: str
    wanted: list[str]
    any_of: bool = False

    def score(self, answer: str) -> float:
        """0 to 1."""
        said = _plain(answer)
        found = [f" {_plain(one)} " in f" {said} " for one in self.wanted]
        return float(any(found)) if self.any_of else sum(found) / len(found)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+(?:\.\d+)?", text.lower().replace(",", "")))


def fact(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    """One of four codes: the simplest task of RAG."""
    cities = rng.sample(CITIES, 4)
    codes = [str(rng.randrange(100_000, 1_000_000)) for _ in cities]
    needles = [f"The secret code of {c} is {n}." for c, n in zip(cities, codes, strict=True)]
    return Task(
        "one fact",
        order,
        hay.with_needles(rng, needles, passages, order),
        f"What is the secret code of {cities[0]}?",
        codes[:1],
    )


def single(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    key, number = rng.choice(WORDS), str(rng.randrange(1_000_000, 10_000_000))
    needle = f"One of the special magic numbers for {key} is: {number}."
    return Task(
        "single needle",
        order,
        hay.with_needles(rng, [needle], passages, order),
        f"What is the special magic number for {key} mentioned in the text?",
        [number],
    )


def multi_value(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    key = rng.choice(WORDS)
    numbers = [str(rng.randrange(1000, 10_000)) for _ in range(3)]
    needles = [f"One of the special magic numbers for {key} is: {n}." for n in numbers]
    return Task(
        "several values",
        order,
        hay.with_needles(rng, needles, passages, order),
        f"What are all the special magic numbers for {key} mentioned in the text?",
        numbers,
    )


def multi_query(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    keys = rng.sample(WORDS, 4)
    numbers = [str(rng.randrange(1000, 10_000)) for _ in keys]
    needles = [
        f"The special magic number for {k} is: {n}." for k, n in zip(keys, numbers, strict=True)
    ]
    return Task(
        "several questions",
        order,
        hay.with_needles(rng, needles, passages, order),
        f"What are the special magic numbers for {keys[0]} and {keys[1]} mentioned in the text?",
        numbers[:2],
    )


def variables(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    names = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=4)) for _ in range(3)]
    value = str(rng.randrange(10_000, 100_000))
    other = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=4)) for _ in range(2)]
    needles = [f"VAR {names[0]} = {value}."]
    needles += [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    needles += [
        f"VAR {other[0]} = {rng.randrange(10_000, 100_000)}.",
        f"VAR {other[1]} = VAR {other[0]}.",
    ]
    return Task(
        "variable tracking",
        order,
        hay.with_needles(rng, needles, max(passages, len(needles)), order),
        f"Which variables are assigned the value {value}, directly or through another variable?",
        names,
    )


def common_words(hay: Haystack, rng: random.Random, passages: int, order: str) -> Task:
    common = rng.sample(WORDS, 3)
    rare = [w for w in WORDS if w not in common]
    size = hay._size // 3
    texts = []
    for _ in range(passages + 1):
        some = [w for w in common for _ in range(size // 6)] + rng.choices(rare, k=size // 2)
        rng.shuffle(some)
        texts.append(" ".join(some))
    cut = hay.cut("\n\n".join(texts))
    chosen = cut[1 : passages + 1]
    if order == "retrieved":
        rng.shuffle(chosen)
    return Task(
        "common words",
        order,
        chosen,
        "What are the three words that appear most often in the lists above?",
        common,
    )


def on_articles(
    hay: Haystack,
    rng: random.Random,
    passages: int,
    order: str,
    questions: Sequence[Any],
    number: int,
) -> Task:
    """A question on the articles, with the chunks of its sources that share most rare words with it."""
    one = questions[number % len(questions)]
    wanted = [one["answer"], *one["also"]]
    asked = set(re.findall(r"\w{4,}", one["question"].lower()))
    chosen: list[Passage] = []
    for source in one["sources"]:
        cut = hay.cut(hay.texts[source])
        holds = [
            p
            for p in cut
            if any(_plain(w) in _plain(hay._tokenizer.decode(p.tokens)) for w in wanted)
        ]
        ranked = sorted(
            holds or cut,
            key=lambda p: (
                -len(asked & set(re.findall(r"\w{4,}", hay._tokenizer.decode(p.tokens).lower())))
            ),
        )
        chosen += (
            ranked[:1]
            if len(one["sources"]) > 1
            else [p for p in cut if p in ranked[:1] or rng.random() < 0.3][:passages]
        )
        if ranked[0] not in chosen:
            chosen[-1] = ranked[0]
    names = [name for name in hay.texts if name not in one["sources"]]
    while len(chosen) < passages:
        chosen.append(rng.choice(hay.cut(hay.texts[rng.choice(names)])))
    if order == "retrieved":
        rng.shuffle(chosen)
    return Task("articles", order, chosen, one["question"], wanted, any_of=True)


FAMILIES = {
    "one fact": fact,
    "single needle": single,
    "several values": multi_value,
    "several questions": multi_query,
    "variable tracking": variables,
    "common words": common_words,
}

SHARED = ("one fact", "single needle", "several values", "several questions")
"""The families that both models can do."""


class _Gathering(Haystack):
    """Notes needles down and hides none."""

    def __init__(self) -> None:
        self.needles: list[str] = []

    def with_needles(
        self, rng: random.Random, needles: Sequence[str], passages: int, order: str
    ) -> list[Passage]:
        self.needles += needles
        return []


def shared(hay: Haystack, rng: random.Random, passages: int, order: str) -> list[Task]:
    """A question of each family of `SHARED` on the same passages, which hold the needles of all."""
    while True:
        gathering = _Gathering()
        tasks = [FAMILIES[name](gathering, rng, passages, order) for name in SHARED]
        asked_for = re.findall(r"numbers? for (\w+)", " ".join(gathering.needles))
        if len(set(asked_for)) == len(gathering.needles) - 4 - 2:
            break  # no word is another family's key: of 12 needles 4 are codes, and 3 have one key
    chosen = hay.with_needles(rng, gathering.needles, passages, order)
    return [replace(task, passages=chosen) for task in tasks]


class Maker:
    """Makes the study's tasks, each from its number alone."""

    def __init__(
        self,
        articles: Path,
        tokenizer: Any,
        size: int,
        seed: int,
        families: Sequence[str] | None = None,
        data: Path | None = None,
        order: str | None = None,
        *,
        shared: bool = False,
        overlap: int = 0,
        chunks_before: int | None = None,
        talk: tuple[str, str] = ("", ""),
    ) -> None:
        self._hay = Haystack(articles, tokenizer, size, overlap, chunks_before)
        self._chunks_before = chunks_before
        self._talk = talk
        self._questions = json.loads((articles / "questions.json").read_text())
        self._tokenizer, self._size, self._seed = tokenizer, size, seed
        self._records = json.loads(data.read_text()) if data is not None else None
        self._orders = ("retrieved", "document") if order is None else (order, order)
        self._families = list(families or (*FAMILIES, "articles"))
        self._shared = shared

    def tasks(self, number: int, passages: int) -> list[Task]:
        """A context's tasks: one, or with `shared` those of all families on it."""
        made = self._tasks(number, passages)
        before, behind = self._talk
        return [replace(task, question=before + task.question + behind) for task in made]

    def _tasks(self, number: int, passages: int) -> list[Task]:
        rng = random.Random(f"{self._seed} {number}")
        if self._shared:
            return shared(self._hay, rng, passages, self._orders[number % 2])
        if self._records is not None:
            order = self._orders[number % 2]
            record = self._records[number % len(self._records)]
            return [self._recorded(record, rng, passages, order)]
        turn, place = divmod(number, len(self._families))
        order = self._orders[turn % 2]
        family = self._families[place]
        if family == "articles":
            return [on_articles(self._hay, rng, passages, order, self._questions, turn)]
        return [FAMILIES[family](self._hay, rng, passages, order)]

    def _recorded(self, record: Any, rng: random.Random, passages: int, order: str) -> Task:
        """A record of MuSiQue's form: half of the passages hold an answer, if so many of its own do.

        They are slices of one text, so that each stands behind those before it.
        """
        wanted = record.get("answers") or [record["answer"]]
        texts = [one["text"] for one in record["ctxs"]]
        tokens = [
            self._tokenizer.encode(text, add_special_tokens=False)[: self._size] for text in texts
        ]
        holds = [n for n, text in enumerate(texts) if _any_in(wanted, text)]
        keep = holds[: passages // 2]
        others = [n for n in range(len(texts)) if n not in keep]
        keep = sorted(keep + rng.sample(others, min(len(others), passages - len(keep))))
        if order == "retrieved":
            rng.shuffle(keep)
        whole = in_a_row(tokens, self._chunks_before)
        chosen = [whole[n] for n in keep]
        return Task("records", order, chosen, record["question"], wanted, any_of=True)


def _any_in(wanted: Sequence[str], text: str) -> bool:
    return any(f" {_plain(one)} " in f" {_plain(text)} " for one in wanted)
