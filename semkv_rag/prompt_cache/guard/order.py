"""Whether the same words mean the same in both orders.

"Did A beat B" and "Did B beat A" have the same words. So equal order is asked for, but for a few
ways of saying the same that are put into one form first:

* "X of Y" and "Y's X";
* "was B beaten by A" and "did A beat B";
* "which planet is the largest" and "what is the largest planet"; "what age is X", "the age of X";
* one phrase behind a preposition that stands in front of the rest instead of behind it.

Any other order counts as another meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

from semkv_rag.prompt_cache.guard.lexicon import lexicon
from semkv_rag.prompt_cache.guard.reading import CONTENT, Kind, Piece, Reading

_MARKERS = (Kind.STRONG, Kind.WEAK)
_BE = frozenset({"is", "are", "was", "were", "be", "been", "being"})
_LINKS = frozenset({"and", "to", "that"})
_Key = tuple[str, str]


def same_order(donor: Reading, prompt: Reading, kinds: frozenset[Kind]) -> bool:
    """Whether pieces of `kinds` stand in orders that mean the same."""
    one, other = _keys(_normal(donor), kinds), _keys(_normal(prompt), kinds)
    return one == other or _rotated(one, other)


def ordered_kinds(readings: Sequence[Reading]) -> frozenset[Kind]:
    """The kinds whose order matters in these prompts."""
    kinds = set(CONTENT)
    for reading in readings:
        if len({piece.key for piece in reading.of(Kind.PERSON)}) > 1:
            kinds.add(Kind.PERSON)
        parted = any(_separates(piece) for piece in reading.pieces[1:-1])
        if parted or any(p.key in ("without", "except") for p in reading.of(Kind.NEGATION)):
            kinds.add(Kind.NEGATION)
        if len(reading.of(Kind.MODAL)) > 1:
            kinds.add(Kind.MODAL)
    return frozenset(kinds)


def _separates(piece: Piece) -> bool:
    """Whether a negation before it and one behind it may deny different things."""
    if piece.kind is Kind.BREAK:
        return piece.text in ",;:.?!("
    clause = {"and", "or", "but", "while", "because", "that", "instead", "except", "unless", "than"}
    return piece.key in clause


def _keys(pieces: Sequence[Piece], kinds: frozenset[Kind]) -> list[_Key]:
    return [(_class(piece), piece.key) for piece in pieces if piece.kind in kinds.union(_MARKERS)]


def _class(piece: Piece) -> str:
    return "marker" if piece.kind in _MARKERS else "content"


def _rotated(one: list[_Key], other: list[_Key]) -> bool:
    """Whether one is the other with its end, from some marker on, moved to the front."""
    if len(one) != len(other):
        return False
    return any(
        (one[at][0] == "marker" and one[at:] + one[:at] == other)
        or (other[at][0] == "marker" and other[at:] + other[:at] == one)
        for at in range(1, len(one))
    )


def _normal(reading: Reading) -> list[Piece]:
    pieces = _superlative(list(reading.pieces))
    return _passive(_genitive(_measure(pieces)))


def _bounds(piece: Piece) -> bool:
    """Whether a noun phrase cannot go on over it."""
    if piece.kind is Kind.AUXILIARY:
        return piece.key in _BE | _LINKS | {
            "do",
            "does",
            "did",
            "have",
            "has",
            "had",
            "will",
            "would",
        }
    return piece.kind not in CONTENT


def _run_before(pieces: Sequence[Piece], end: int) -> int:
    start = end
    while start > 0 and not _bounds(pieces[start - 1]):
        start -= 1
    return start


def _run_behind(pieces: Sequence[Piece], start: int) -> int:
    end = start
    while end < len(pieces) and not _bounds(pieces[end]):
        end += 1
    return end


def _genitive(pieces: list[Piece]) -> list[Piece]:
    """ "X of Y" becomes "Y X", the innermost first."""
    # No run goes over an "of", so what is moved leaves those before it where they are.
    for at in [i for i, piece in enumerate(pieces) if piece.kind is Kind.OF][::-1]:
        start, end = _run_before(pieces, at), _run_behind(pieces, at + 1)
        owned, owner = pieces[start:at], pieces[at + 1 : end]
        pieces = pieces[:start] + owner + owned + pieces[end:]
    return pieces


def _superlative(pieces: list[Piece]) -> list[Piece]:
    """ "which planet is the largest" becomes "which largest planet"."""
    for at, piece in enumerate(pieces):
        if not (piece.kind is Kind.AUXILIARY and piece.key in _BE):
            continue
        behind = at + 1
        while behind < len(pieces) and pieces[behind].key in ("the", "a", "an"):
            behind += 1
        start = _run_before(pieces, at)
        asked = start > 0 and pieces[start - 1].key == "what" and start < at
        if asked and behind < len(pieces) and _is_superlative(pieces[behind]):
            rest = pieces[behind + 1 :]
            if not rest or _bounds(rest[0]):
                return [*pieces[:start], pieces[behind], *pieces[start:at], *rest]
    return pieces


def _is_superlative(piece: Piece) -> bool:
    return piece.kind is Kind.WORD and piece.text.lower().endswith(("est", "best", "worst"))


def _measure(pieces: list[Piece]) -> list[Piece]:
    """What is asked for comes first: "what age is X", "what is the age of X", "what is X's age"."""
    measures = lexicon().measures
    found = [at for at, piece in enumerate(pieces) if piece.key in measures]
    asked = [at for at, piece in enumerate(pieces) if piece.key == "what"]
    if len(found) != 1 or len(asked) != 1:
        return pieces
    at, what = found[0], asked[0]
    start = what + 1
    is_being = start < len(pieces) and pieces[start].key in _BE
    while start < len(pieces) and pieces[start].kind is Kind.AUXILIARY:
        start += 1
    leading = (
        at == start
        and at + 1 < len(pieces)
        and (
            pieces[at + 1].kind is Kind.OF
            or (not is_being and pieces[at + 1].kind is Kind.AUXILIARY)
        )
    )
    owned = is_being and start <= at == _run_behind(pieces, start) - 1
    ends = at + 1 == len(pieces) or pieces[at + 1].kind in (*_MARKERS, Kind.BREAK)
    verb = ends and not is_being and pieces[at].text.lower() == "cost"
    if not (leading or owned or verb):
        return pieces
    behind = at + 1 + (at + 1 < len(pieces) and pieces[at + 1].kind is Kind.OF)
    return [*pieces[: what + 1], pieces[at], *pieces[what + 1 : at], *pieces[behind:]]


def _passive(pieces: list[Piece]) -> list[Piece]:
    """ "was B beaten by A" becomes "A beaten B"."""
    if pieces[:2] and pieces[0].key == "by" and pieces[1:2] and pieces[1].kind is Kind.QUESTION:
        pieces = [*pieces[1:], pieces[0]]
        while pieces[-2].kind is Kind.BREAK:
            pieces = [*pieces[:-2], pieces[-1]]
    for at, piece in enumerate(pieces):
        verb = at - 1
        if piece.key != "by" or verb < 1 or not pieces[verb].participle:
            continue
        patient = verb
        crossed = False
        while patient > 0 and (
            not _bounds(pieces[patient - 1]) or pieces[patient - 1].kind is Kind.AUXILIARY
        ):
            patient -= 1
            crossed = crossed or pieces[patient].key in _BE
        if not crossed:
            continue
        start = at + 1
        while start < len(pieces) and pieces[start].kind is Kind.QUESTION:
            start += 1
        agent = _run_behind(pieces, start)
        question = pieces[at + 1 : start]
        active = [*question, *pieces[start:agent], pieces[verb], *pieces[patient:verb]]
        return [*pieces[:patient], *active, *pieces[agent:]]
    return pieces
