"""Thousands of broken documents and hostile texts: no error but CorpusError, none over its time."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path

import pytest

from semkv_rag.corpus import split_text
from semkv_rag.prompt_cache import Normalisation
from semkv_rag.prompt_cache.guard import veto
from semkv_rag.prompt_cache.guard.vetoes import LONGEST_PROMPT
from tests.budget import BUDGET_SECONDS, cpu_seconds
from tests.corpus.fuzzing import KINDS, fuzz
from tests.corpus.made_up_engine import word_tokenizer

pytestmark = pytest.mark.soak
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

DOCUMENTS = 5_000
TEXTS = 500

PIECES = [
    "\u0301", "\u0334", "\uff9e", "\u0344", "\u200b", "\u00ad", "\ufdfa", "\u2026", "\u0345", "é",
    "漢", "😀", "\ud83d", "1", "1,", ".", ",", "/", "-", "_", "@", "://", "(", "[", "{", "<", ">",
    '"', "'", "'s", "n't", "`", "|", "#", "*", " ", "\n", "\r\n", "\t", "\u00a0", "a", "A", "aB",
    "not ", "of ", "the ", "is ", "by ", "do ", "what ", "which ", "5 km ", "May 1 ", "hundred ",
    "largest ", "asked ", "i.e. ", "word ", "\\", "&", "%", "$5 ", "½", "²",
]  # fmt: skip


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_broken_documents(kind: str, tmp_path: Path, rounds: int) -> None:
    outcome = fuzz(kind, range(DOCUMENTS * rounds), tmp_path)
    logger.info(
        "%s: %d read, %d refused; the slowest, number %d, took %.2f s",
        *(kind, outcome.read, outcome.refused, outcome.slowest, outcome.slowest_s),
    )
    assert outcome.too_slow == []


@pytest.mark.timeout(0)
def test_hostile_texts(rounds: int) -> None:
    """A few pieces over and over, which finds what is quadratic, or any in any order."""
    tokenizer = word_tokenizer()
    slowest: dict[str, tuple[float, int]] = {}
    for seed in range(TEXTS * rounds):
        rng = random.Random(seed)
        some = rng.choices(PIECES, k=rng.choice((1, 2, 3, 5, len(PIECES))))
        length = rng.choice((LONGEST_PROMPT, 50_000, 200_000))
        text = (
            "".join(rng.choices(some, k=length)) if rng.random() < 0.5 else "".join(some) * length
        )
        text = text[:length]
        encodable = text.encode(errors="replace").decode()
        one, other = text[:LONGEST_PROMPT], "".join(rng.choices(some, k=LONGEST_PROMPT))
        works = {
            "normalise": partial(Normalisation(), text),
            "compare": partial(veto, one, other[:LONGEST_PROMPT]),
            "compare with itself": partial(veto, one, one),
            "split": partial(split_text, encodable, tokenizer, 512),
            "split Markdown": partial(split_text, encodable, tokenizer, 512, 0, True),
        }
        for name, work in works.items():
            took = cpu_seconds(work)
            slowest[name] = max(slowest.get(name, (0.0, 0)), (took, seed))
            assert took < BUDGET_SECONDS, f"{name}, seed {seed}"
    for name, (took, seed) in slowest.items():
        logger.info("%s: at most %.2f s, with seed %d", name, took, seed)
