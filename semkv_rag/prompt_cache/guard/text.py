"""Turns a prompt into tokens: contractions written out, framing taken off, phrases replaced."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from semkv_rag.prompt_cache.guard.lexicon import lexicon
from semkv_rag.prompt_cache.normalise import compatible

_QUOTES = str.maketrans(
    {"’": "'", "‘": "'", "`": "'", "“": '"', "”": '"', "−": "-", "–": "-", "—": "-"}
)

_CONTRACTIONS = [
    (re.compile(pattern, re.IGNORECASE), written)
    for pattern, written in (
        (r"\bcan't\b|\bcannot\b", "can not"),
        (r"\bwon't\b", "will not"),
        (r"\bshan't\b", "shall not"),
        (r"n't\b", " not"),
        (r"\b(what|who|where|when|how|why|that|there|here|it|he|she)'s\b", r"\1 is"),
        (r"'re\b", " are"),
        (r"'m\b", " am"),
        (r"'ve\b", " have"),
        (r"'ll\b", " will"),
        (r"\b(i|you|he|she|we|they|it|who|what|how|where)'d\b", r"\1 would"),
    )
]

# Repeats before a sign are bounded, so that a long run without it is not read again from each token.
_TOKEN = re.compile(
    r"""
      (?P<identifier> \w{1,16}://\S+ | [\w.+-]{1,64}@[\w-]+\.\w[\w.]*
        | v?\d+(?:\.\d+){2,}[\w.-]* | [vV]\d[\w.]*
        | --?[A-Za-z][\w-]+ | [\w.]{0,64}\w_\w[\w.]*(?:\(\))? | [A-Za-z_][\w.]{0,64}\(\)
        | [a-z]+[A-Z]\w* | [A-Za-z]+-?\d[\w-]* )
    | (?P<date> \d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b | \d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b )
    | (?P<clock> \d{1,2}:\d{2}(?::\d{2})?\b )
    | (?P<ordinal> \d+(?:st|nd|rd|th)\b )
    | (?P<decade> \d{4}'?s\b )
    | (?P<number> (?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+\b)? | \.\d+ )
    | (?P<word> km/h | m/s | [^\W\d_]\.[^\W\d_]\.?(?:[^\W\d_]\.)* | [^\W\d_]+(?:-[^\W\d_]+)* | [^\W\d_]+ )
    | (?P<possessive> (?<=\w)'s\b | (?<=s)'(?=[\s,.?!]|$) )
    | (?P<clause> [,;:.?!()\[\]{}"'\n] )
    | (?P<symbol> \S )
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    """One word, number or sign.

    Attributes:
        text: as it stands in the prompt.
        lower: for look-ups; of a replaced phrase, what replaces it.
        kind: the name of its group in the pattern.
        first: whether a sentence starts with it, so that a capital says nothing.
        glued: whether it follows without a space.
    """

    text: str
    lower: str
    kind: str
    first: bool = False
    glued: bool = False


def tokens(text: str) -> list[Token]:
    """Every non-blank character is in some token but for possessive endings."""
    # ² and the like would become plain digits.
    if any(unicodedata.category(character) == "No" for character in text):
        plain = text
    else:
        plain = compatible(text)
    plain = plain.translate(_QUOTES)
    for pattern, written in _CONTRACTIONS:
        plain = pattern.sub(written, plain)
    found: list[Token] = []
    first, end = True, -1
    for match in _TOKEN.finditer(plain):
        kind = match.lastgroup or "symbol"
        glued, end = match.start() == end, match.end()
        if kind == "possessive":
            continue
        parts = [match.group()]
        if kind == "word" and "-" in parts[0]:
            parts = parts[0].split("-")
        for part in parts:
            found.append(Token(part, part.lower().rstrip("."), kind, first, glued))
            first = kind == "clause" and part not in ",'\"("
    return found


def without_framing(found: Sequence[Token]) -> tuple[list[Token], bool]:
    """The tokens behind the framing, and whether a noun is asked for without a question word."""
    words = lexicon()
    rest = list(found)
    framed = noun = False
    while rest:
        if rest[0].kind == "clause":
            rest = rest[1:]
            continue
        if framed and rest[0].lower in words.framing_joints:
            rest, noun = rest[1:], False
            continue
        lower = [token.lower for token in rest]
        length = _framing(lower)
        if not length:
            break
        framed = noun = True
        rest = rest[length:]
    asks = any(token.lower in words.questions for token in rest)
    return rest, noun and not asks and bool(rest) and _starts_noun(rest[0])


def _starts_noun(token: Token) -> bool:
    """Whether a noun phrase, not a question without question word, starts with this token."""
    if token.lower in lexicon().persons or token.lower in ("the", "a", "an"):
        return True
    return (
        token.text[:1].isupper() and token.lower not in lexicon().ignored | lexicon().modals.keys()
    )


def _framing(lower: Sequence[str]) -> int:
    """Words of the framing that `lower` starts with, or 0."""
    words = lexicon()
    if length := _starts(lower, words.framing):
        return length
    length = _starts(lower, words.framing_before_question)
    if length and length < len(lower) and lower[length] in words.questions:
        return length
    length = _starts(lower, words.framing_before_noun)
    return length if length and list(lower[length : length + 1]) == ["the"] else 0


def _starts(lower: Sequence[str], phrases: Sequence[tuple[str, ...]]) -> int:
    """Words of the first phrase that `lower` starts with, or 0."""
    return next((len(p) for p in phrases if tuple(lower[: len(p)]) == p), 0)


def _is_courtesy(found: Sequence[Token], at: int) -> bool:
    """Whether a word says nothing. One behind a quote or a colon is what is talked about."""
    named = at > 0 and found[at - 1].kind == "clause" and found[at - 1].text in "\"'(:"
    return found[at].lower in lexicon().courtesies and not named


def replaced(found: Sequence[Token]) -> list[Token]:
    """Phrases replaced, the longest first, and courtesies dropped."""
    words = lexicon()
    result: list[Token] = []
    at = 0
    kept = [token for at, token in enumerate(found) if not _is_courtesy(found, at)]
    while at < len(kept):
        for length in range(min(words.longest_phrase, len(kept) - at), 0, -1):
            group = kept[at : at + length]
            instead = words.phrases.get(tuple(token.lower for token in group))
            if instead is not None:
                shown = " ".join(token.text for token in group)
                result += [Token(shown, word, "word", first=True) for word in instead]
                at += length
                break
        else:
            result.append(kept[at])
            at += 1
    return result
