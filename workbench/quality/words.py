"""The words of the yardstick: one token each, known by number.

Names are drawn once at random and their embeddings are never trained, so that the names kept for
evaluation (`HELD_NAMES`, `HELD_PROPER`), which no training context contains, are to the model what any
other name is: a direction it has to match, not a word it knows. They have the highest numbers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

PAD, END_OF_ANSWER, UNKNOWN, ASK, QUESTION, IS, LIKE, HAS, IT, SAW, THE = range(11)


def _several(line: str) -> list[str]:
    return line.split()


_FUNCTION = ["<pad>", "<eos>", "<unk>", "ask", "?", "is", "like", "has", "it", "saw", "the"]
_ENDS = [".", ";", "too", "again", "indeed"]
_ADJECTIVES = _several("old new big wide dark calm long thin warm cold loud soft")
_NOUNS = _several("house bridge river tower market garden road hill lake field boat lamp")
_VALUES = _several(
    "amber azure beige black blue bronze brown coral cream crimson cyan ebony emerald gold green grey "
    "indigo ivory jade khaki lemon lilac lime mauve mint navy ochre olive orange peach pearl pink plum "
    "purple red rose ruby rust sand scarlet sepia silver slate tan teal umber violet white yellow "
    "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty "
    "seventy eighty ninety hundred north south east west spring summer autumn winter monday tuesday "
    "friday sunday march april june july august iron copper tin zinc lead steel glass stone wood paper"
)
_PLAIN = (192, 80)
_PROPER = (48, 24)


def _invent() -> list[str]:
    """Words nobody uses, the same ones every time, enough for all names."""
    draw = random.Random(20240)
    found: dict[str, None] = {}
    while len(found) < sum(_PLAIN) + sum(_PROPER):
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(2))
        found[word + draw.choice("klmnrstx")] = None
    return list(found)


def _count_up(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


ENDS = _count_up(len(_FUNCTION), len(_ENDS))
ADJECTIVES = _count_up(ENDS[-1] + 1, len(_ADJECTIVES))
NOUNS = _count_up(ADJECTIVES[-1] + 1, len(_NOUNS))
VALUES = _count_up(NOUNS[-1] + 1, len(_VALUES))
NAMES = _count_up(VALUES[-1] + 1, _PLAIN[0])
PROPER = _count_up(NAMES[-1] + 1, _PROPER[0])
HELD_NAMES = _count_up(PROPER[-1] + 1, _PLAIN[1])
HELD_PROPER = _count_up(HELD_NAMES[-1] + 1, _PROPER[1])

_INVENTED = _invent()
_NAMES_AT = [
    0,
    _PLAIN[0],
    _PLAIN[0] + _PROPER[0],
    sum(_PLAIN) + _PROPER[0],
    sum(_PLAIN) + sum(_PROPER),
]
_GROUPS = [_INVENTED[a:b] for a, b in itertools.pairwise(_NAMES_AT)]
WORDS: list[str] = [*_FUNCTION, *_ENDS, *_ADJECTIVES, *_NOUNS, *_VALUES]
"""Every word by its number. Proper names are those with a capital letter."""
WORDS += _GROUPS[0] + [w.capitalize() for w in _GROUPS[1]]
WORDS += _GROUPS[2] + [w.capitalize() for w in _GROUPS[3]]

FIRST_NAME = NAMES[0]
"""From this number on words are names, whose embeddings are not trained."""
FIRST_HELD = HELD_NAMES[0]
"""From this number on they are names that no training context contains."""


def text(tokens: Iterable[int]) -> str:
    """`tokens` as a reader sees them, separated by spaces."""
    return " ".join(WORDS[token] for token in tokens)
