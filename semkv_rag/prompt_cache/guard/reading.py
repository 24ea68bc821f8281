"""What the vetoes compare: a prompt as a sequence of classified pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from semkv_rag.prompt_cache.guard.amounts import amount_at
from semkv_rag.prompt_cache.guard.lexicon import lexicon
from semkv_rag.prompt_cache.guard.text import Token, replaced, tokens, without_framing
from semkv_rag.prompt_cache.guard.units import UNITS


class Kind(StrEnum):
    """What a piece is, in the words of a veto's reason."""

    QUANTITY = "number"
    ORDINAL = "ordinal"
    DATE = "date"
    TIME = "time of day"
    NEGATION = "negation"
    QUANTIFIER = "quantifier"
    MODAL = "modal verb"
    QUESTION = "question word"
    TEMPORAL = "temporal word"
    PERSON = "pronoun"
    STRONG = "direction word"
    WEAK = "preposition"
    NAME = "name"
    IDENTIFIER = "identifier"
    WORD = "word"
    SYMBOL = "sign"
    OF = "of"
    AUXILIARY = "auxiliary"
    BREAK = "punctuation"


CONTENT = frozenset({
    Kind.QUANTITY, Kind.ORDINAL, Kind.DATE, Kind.TIME, Kind.QUANTIFIER, Kind.TEMPORAL,
    Kind.NAME, Kind.IDENTIFIER, Kind.WORD, Kind.SYMBOL,
})  # fmt: skip
"""What must stand in both prompts, in an order that means the same."""


@dataclass(frozen=True)
class Piece:
    """One classified token or group of tokens.

    Attributes:
        key: equal for pieces of the same meaning.
        text: as it stands in the prompt.
        finite_past, participle: what a verb's form says.
    """

    kind: Kind
    key: str
    text: str
    finite_past: bool = False
    participle: bool = False


@dataclass(frozen=True)
class Reading:
    """A prompt's pieces in their order.

    Attributes:
        tense: past, present, future or conditional.
    """

    pieces: tuple[Piece, ...]
    tense: str

    def of(self, *kinds: Kind) -> list[Piece]:
        """The pieces of these kinds, in order."""
        return [piece for piece in self.pieces if piece.kind in kinds]


def read(prompt: str, names: frozenset[str] = frozenset()) -> Reading:
    """Classify a prompt.

    Args:
        names: words, lower case, that are names in the prompt this one is compared with: they are
            compared by their letters here too.
    """
    found, noun_asked = without_framing(tokens(prompt))
    found = replaced(found)
    pieces = [Piece(Kind.QUESTION, "what", "")] if noun_asked else []
    at = 0
    while at < len(found):
        amount = amount_at(found, at)
        if amount is not None:
            shown = " ".join(token.text for token in found[at : at + amount.length])
            if amount.kind in ("date", "time") and pieces and pieces[-1].kind is Kind.WEAK:
                # "on January 5", "in January", "at 5 pm": which one follows from the date.
                pieces[-1] = Piece(Kind.AUXILIARY, pieces[-1].key, pieces[-1].text)
            pieces.append(Piece(_AMOUNTS[amount.kind], amount.key, shown))
            at += amount.length
            continue
        pieces.append(_stressed(found, at) or _piece(found[at], names))
        at += 1
    if not any(p.kind is Kind.QUESTION and p.key != "how_much" for p in pieces) and any(
        p.key == lexicon().canonical("cost") for p in pieces
    ):
        # "How much does X cost" is "what is the price of X".
        pieces = [Piece(p.kind, "what", p.text) if p.key == "how_much" else p for p in pieces]
    return Reading(tuple(pieces), _tense(found, pieces))


def name_words(prompt: str) -> frozenset[str]:
    """The words of a prompt that are written as names, lower case."""
    return frozenset(t.lower for t in replaced(tokens(prompt)) if _looks_like_name(t))


_AMOUNTS = {
    "quantity": Kind.QUANTITY,
    "ordinal": Kind.ORDINAL,
    "date": Kind.DATE,
    "time": Kind.TIME,
}


def _looks_like_name(token: Token) -> bool:
    return (
        token.kind == "word"
        and token.text[:1].isupper()
        and not token.first
        and token.text != "I"
        and token.lower not in UNITS
    )


def _stressed(found: Sequence[Token], at: int) -> Piece | None:
    """An article or auxiliary that stands for more: "f(a)", "what do dogs have"."""
    token = found[at]
    behind = found[at + 1] if at + 1 < len(found) else None
    lone = behind is None or behind.kind in ("clause", "symbol")
    if token.lower in ("do", "have"):
        lone = any(other.lower in ("do", "does", "did") for other in found[:at])
    if token.lower in ("a", "an", "the", "do", "have") and lone:
        return Piece(Kind.WORD, token.lower, token.text)
    return None


def _is_code(text: str) -> bool:
    """Whether case matters in an identifier: `getUser` is code, GPT-4 and gpt-4 are a name."""
    return (
        text.startswith("-")
        or any(sign in text for sign in "_./:()@")
        or (not text[0].isupper() and any(letter.isupper() for letter in text))
    )


def _is_acronym(text: str) -> bool:
    """Whether these capitals are no pronoun or auxiliary, but IT, US or WHO."""
    words = lexicon()
    stressed = text.lower() in words.negations or text.lower() in words.quantifiers
    return len(text) > 1 and text.isupper() and not stressed


def _piece(token: Token, names: frozenset[str]) -> Piece:
    words = lexicon()
    lower, text = token.lower, token.text
    if token.kind == "clause":
        return Piece(Kind.BREAK, lower, text)
    if token.kind == "identifier":
        return Piece(Kind.IDENTIFIER, text if _is_code(text) else lower, text)
    if token.kind not in ("word", "symbol"):
        return Piece(Kind.SYMBOL, lower, text)
    if token.kind == "symbol":
        return Piece(Kind.SYMBOL, lower, text)
    if len(text) == 1 and text.lower() not in ("a", "i"):
        return Piece(Kind.IDENTIFIER, text, text)  # "-v" is not "-V"
    if not token.first and (text == "A" or _is_acronym(text)):
        return Piece(Kind.NAME, lower, text)
    if lower == "of":
        return Piece(Kind.OF, lower, text)
    for kind, table in (
        (Kind.NEGATION, words.negations),
        (Kind.QUESTION, words.questions),
        (Kind.QUANTIFIER, words.quantifiers),
        (Kind.PERSON, words.persons),
    ):
        if lower in table:
            return Piece(kind, table[lower], text)
    if lower in words.modals and lower not in names:
        return Piece(Kind.MODAL, words.modals[lower], text)
    if lower in words.ignored:
        return Piece(Kind.AUXILIARY, lower, text)
    if lower in words.strong_markers:
        return Piece(Kind.STRONG, lower, text)
    if lower in words.weak_markers:
        return Piece(Kind.WEAK, words.weak_markers[lower], text)
    if lower in words.temporal:
        return Piece(Kind.TEMPORAL, lower, text)
    if lower in names or _looks_like_name(token):
        return Piece(Kind.NAME, lower, text)
    if lower in UNITS and len(lower) > 1:
        return Piece(Kind.WORD, words.canonical(UNITS[lower][2]), text)
    return Piece(
        Kind.WORD,
        words.canonical(lower),
        text,
        finite_past=lower in words.past_forms or (lower.endswith("ed") and len(lower) > 4),
        participle=lower in words.participles or (lower.endswith("ed") and len(lower) > 4),
    )


def _tense(found: Sequence[Token], pieces: Sequence[Piece]) -> str:
    lower = {token.lower for token in found if token.kind == "word"}
    if lower & {"will", "shall"}:
        return "future"
    if "would" in lower:
        return "conditional"
    if lower & {"was", "were", "did", "had"}:
        return "past"
    if lower & {"is", "are", "am", "do", "does"}:
        return "present"
    if any(piece.kind is Kind.MODAL for piece in pieces) or {"how", "to"} <= lower:
        return "present"
    return "past" if any(piece.finite_past for piece in pieces) else "present"
