"""Differences in meaning that forbid to answer one prompt with another's KV, however similar.

Every check sees both prompts as pieces (`reading.py`); the first that objects decides. They fail
closed: a word that just one of the prompts has, and that no line of the lexicon explains, is a veto,
and so is an exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semkv_rag.prompt_cache.guard.lexicon import lexicon
from semkv_rag.prompt_cache.guard.order import ordered_kinds, same_order
from semkv_rag.prompt_cache.guard.reading import CONTENT, Kind, Piece, Reading, name_words, read
from semkv_rag.prompt_cache.normalise import compatible

LONGEST_PROMPT = 4_000
"""Characters, as written and in the form NFKC, which may be 18 times as long.

A longer prompt is vetoed: the checks are for questions, and some are quadratic.
"""


@dataclass(frozen=True)
class Veto:
    """Why a donor must not answer.

    Attributes:
        reason: in words.
        donor: the piece of the donor that differs, empty if it has none.
        prompt: the piece of the prompt that differs, empty if it has none.
    """

    reason: str
    donor: str
    prompt: str


def veto(donor: str, prompt: str) -> Veto | None:
    """The first difference in meaning between two prompts, or None if none is seen. Never raises."""
    try:
        return _veto(donor, prompt)
    except Exception as error:
        return Veto(f"the check failed ({type(error).__name__}: {error})", "", "")


def _veto(donor: str, prompt: str) -> Veto | None:
    if _too_long(donor) or _too_long(prompt):
        return Veto(f"a prompt is longer than {LONGEST_PROMPT:,} characters", "", "")
    names = name_words(donor) | name_words(prompt)
    one, other = read(donor, names), read(prompt, names)
    if not one.pieces or not other.pieces:
        return Veto("a prompt is empty", donor[:80], prompt[:80])
    for check in _CHECKS:
        if (found := check(one, other)) is not None:
            return found
    return None


def _too_long(text: str) -> bool:
    return len(text) > LONGEST_PROMPT or len(compatible(text)) > LONGEST_PROMPT


_Check = Callable[[Reading, Reading], Veto | None]


def _differ(kind: Kind) -> _Check:
    """A check that both prompts have the same pieces of a kind, in any order."""

    def check(donor: Reading, prompt: Reading) -> Veto | None:
        return _only_in_one(donor.of(kind), prompt.of(kind), f"another {kind}")

    return check


def _only_in_one(donor: Sequence[Piece], prompt: Sequence[Piece], reason: str) -> Veto | None:
    left, right = _leftovers(donor, prompt)
    if not left and not right:
        return None
    return Veto(reason, _shown(left), _shown(right))


def _leftovers(donor: Sequence[Piece], prompt: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces of each that have no partner in the other."""
    return _without(donor, prompt), _without(prompt, donor)


def _without(pieces: Sequence[Piece], others: Sequence[Piece]) -> list[Piece]:
    partners = Counter(piece.key for piece in others)
    left = []
    for piece in pieces:
        partners[piece.key] -= 1
        if partners[piece.key] < 0:
            left.append(piece)
    return left


def _shown(pieces: Sequence[Piece]) -> str:
    return ", ".join(piece.text or piece.key for piece in pieces)


def _question(donor: Reading, prompt: Reading) -> Veto | None:
    return _only_in_one(donor.of(Kind.QUESTION), prompt.of(Kind.QUESTION), "another question word")


def _tense(donor: Reading, prompt: Reading) -> Veto | None:
    if donor.tense == prompt.tense:
        return None
    return Veto("another tense", donor.tense, prompt.tense)


def _person(donor: Reading, prompt: Reading) -> Veto | None:
    left, right = _leftovers(donor.of(Kind.PERSON), prompt.of(Kind.PERSON))
    if not left and not right:
        return None
    keys = [{piece.key for piece in reading.of(Kind.PERSON)} for reading in (donor, prompt)]
    anyone = all(found <= {"first"} or found <= {"second"} for found in keys)
    if anyone and all(_for_anyone(reading) for reading in (donor, prompt)):
        return None
    return Veto("another person", _shown(left), _shown(right))


def _for_anyone(reading: Reading) -> bool:
    """Whether "my" and "your" stand for anyone's: behind "how to"."""
    following = zip(reading.pieces, reading.pieces[1:], strict=False)
    return any(piece.key == "how" and behind.key == "to" for piece, behind in following)


def _opposites(donor: Reading, prompt: Reading) -> Veto | None:
    kinds = (Kind.WORD, Kind.TEMPORAL, Kind.STRONG, Kind.WEAK, Kind.QUANTIFIER, Kind.NEGATION)
    left, right = _leftovers(donor.of(*kinds), prompt.of(*kinds))
    words = lexicon()
    places: dict[str, int] = {}
    for place, other in enumerate(right):
        places.setdefault(_word(other), place)
    for one in left:
        facing = [places[word] for word in words.opposites(_word(one)) if word in places]
        if facing:
            return Veto("opposites", one.text, right[min(facing)].text)
    return None


def _word(piece: Piece) -> str:
    """The canonical word: only words have it for a key."""
    return piece.key if piece.kind is Kind.WORD else lexicon().canonical(piece.key)


def _content(donor: Reading, prompt: Reading) -> Veto | None:
    kinds = tuple(CONTENT)
    left, right = _leftovers(donor.of(*kinds), prompt.of(*kinds))
    if not left and not right:
        return None
    named = next((piece for piece in (*left, *right) if piece.kind in _NAMES), None)
    kind = named.kind if named else (*left, *right)[0].kind
    return Veto(f"a {kind} that only one of the prompts has", _shown(left), _shown(right))


_NAMES = (Kind.NAME, Kind.IDENTIFIER)


def _markers(donor: Reading, prompt: Reading) -> Veto | None:
    # "by" comes and goes with the passive, which the order sees to.
    left, right = ([p for p in r.of(Kind.STRONG) if p.key != "by"] for r in (donor, prompt))
    return _only_in_one(left, right, f"another {Kind.STRONG}")


def _order(donor: Reading, prompt: Reading) -> Veto | None:
    kinds = ordered_kinds((donor, prompt))
    if same_order(donor, prompt, kinds):
        return None
    shown = tuple(" ".join(p.text for p in r.of(*kinds, Kind.STRONG)) for r in (donor, prompt))
    return Veto("the same words in another order", *shown)


_CHECKS: tuple[_Check, ...] = (
    _differ(Kind.QUANTITY),
    _differ(Kind.DATE),
    _differ(Kind.TIME),
    _differ(Kind.ORDINAL),
    _differ(Kind.NEGATION),
    _opposites,
    _differ(Kind.QUANTIFIER),
    _differ(Kind.TEMPORAL),
    _question,
    _differ(Kind.MODAL),
    _tense,
    _person,
    _content,
    _markers,
    _differ(Kind.WEAK),
    _order,
)
