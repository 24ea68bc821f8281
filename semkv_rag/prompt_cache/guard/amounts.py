"""Numbers, quantities, ordinals, dates and times of day in one normal form.

5 km, 5,000 m and five kilometres are equal; 2023-01-05 and January 5, 2023 are; 5 pm and 17:00 are.
What has two readings (1/5/2023) keeps its spelling, so that it equals itself alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from semkv_rag.prompt_cache.guard.text import Token
from semkv_rag.prompt_cache.guard.units import CASED, CURRENCIES, SPEEDS, UNITS

_SMALL_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
_TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINAL_WORDS = """first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"""
_MONTH_WORDS = """january february march april may june july august september october november
december"""


def _numbered(words: str, first: int) -> dict[str, int]:
    return {word: number for number, word in enumerate(words.split(), first)}


_SMALL = _numbered(_SMALL_WORDS, 0)
_TENS = {word: 10 * number for word, number in _numbered(_TEN_WORDS, 2).items()}
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SUFFIXES = {"k": 10**3, "bn": 10**9}
_ORDINALS = _numbered(_ORDINAL_WORDS, 1) | {"hundredth": 100}
_ORDINALS |= {word[:-1] + "ieth": value for word, value in _TENS.items()}
_MONTHS = _numbered(_MONTH_WORDS, 1)
_MONTHS |= {name[:3]: number for name, number in _MONTHS.items()} | {"sept": 9}
_LONE_UNITS = frozenset(
    {"hour", "day", "week", "month", "year", "mile", "kilometre", "kilometer", "litre", "liter"}
)
_RATES = frozenset({"per", "miles", "times", "once", "twice"})


@dataclass(frozen=True)
class Amount:
    """One amount and how many tokens it took.

    Attributes:
        kind: quantity, ordinal, date or time.
        key: equal for equal amounts.
        length: tokens.
    """

    kind: str
    key: str
    length: int


def amount_at(found: Sequence[Token], at: int) -> Amount | None:
    """The amount that starts at token `at`, if one does."""
    return _date(found, at) or _time(found, at) or _ordinal(found, at) or _quantity(found, at)


def _at(found: Sequence[Token], at: int) -> Token | None:
    return found[at] if 0 <= at < len(found) else None


def _lower(found: Sequence[Token], at: int) -> str:
    token = _at(found, at)
    return token.lower if token else ""


# Dates


def _date(found: Sequence[Token], at: int) -> Amount | None:
    token = found[at]
    if token.kind == "date":
        return Amount("date", _numeric_date(token.text), 1)
    if token.kind == "decade":
        return Amount("date", f"{token.text[:4]}s", 1)
    if (month := _month(found, at)) is not None:
        day, end = _day(found, at + 1)
        year, end = _year(found, end)
        # "May" and "March" alone are words; with a day or a year they are months.
        if day is None and year is None:
            return None
        return Amount("date", _date_key(year, month, day), end - at)
    skip = 1 if _lower(found, at) == "the" else 0
    day, end = _day(found, at + skip)
    if day is not None:
        end += _lower(found, end) == "of"
        if (month := _month(found, end)) is not None:
            year, end = _year(found, end + 1)
            return Amount("date", _date_key(year, month, day), end - at)
    return None


def _date_key(year: int | None, month: int, day: int | None) -> str:
    return (
        f"{year if year is not None else '????'}-{month:02}-{day if day is not None else '??':0>2}"
    )


def _numeric_date(text: str) -> str:
    one, two, three = (int(part) for part in re.split(r"[-/.]", text))
    if one > 31 and two <= 12:
        return _date_key(one, two, three)
    if three > 31 and "." in text and two <= 12:
        return _date_key(three, two, one)
    if three > 31 and one > 12 >= two:
        return _date_key(three, two, one)
    if three > 31 and two > 12 >= one:
        return _date_key(three, one, two)
    return text


def _month(found: Sequence[Token], at: int) -> int | None:
    token = _at(found, at)
    if token is None or token.kind != "word" or not token.text[:1].isupper():
        return None
    return _MONTHS.get(token.lower)


def _day(found: Sequence[Token], at: int) -> tuple[int | None, int]:
    start = at + (_lower(found, at) == "the")
    token = _at(found, start)
    if token and token.kind in ("number", "ordinal"):
        digits = re.fullmatch(r"(\d{1,2})(?:st|nd|rd|th)?", token.text)
        if digits and 1 <= int(digits[1]) <= 31:
            return int(digits[1]), start + 1
    return None, at


def _year(found: Sequence[Token], at: int) -> tuple[int | None, int]:
    start = at + (_lower(found, at) in (",", "of"))
    token = _at(found, start)
    if token and token.kind == "number" and re.fullmatch(r"[12]\d{3}", token.text):
        return int(token.text), start + 1
    return None, at


# Times of day


def _time(found: Sequence[Token], at: int) -> Amount | None:
    token = found[at]
    half = _lower(found, at + 1).replace(".", "")
    half = half if half in ("am", "pm") else ""
    if token.kind == "clock":
        hours, minutes, *seconds = (int(part) for part in token.text.split(":"))
    elif token.kind == "number" and half and re.fullmatch(r"1?\d", token.text):
        hours, minutes, seconds = int(token.text), 0, []
    elif token.lower in ("noon", "midnight"):
        return Amount("time", "12:00" if token.lower == "noon" else "00:00", 1)
    else:
        return None
    if half:
        hours = hours % 12 + 12 * (half == "pm")
    key = ":".join(f"{part:02}" for part in (hours, minutes, *seconds))
    return Amount("time", key, 1 + bool(half))


# Ordinals


def _ordinal(found: Sequence[Token], at: int) -> Amount | None:
    token = found[at]
    if token.kind == "ordinal":
        return Amount("ordinal", str(int(token.text[:-2])), 1)
    if token.lower in _ORDINALS:
        return Amount("ordinal", str(_ORDINALS[token.lower]), 1)
    unit = _ORDINALS.get(_lower(found, at + 1), 99)
    if token.lower in _TENS and unit < 10:
        return Amount("ordinal", str(_TENS[token.lower] + unit), 2)
    return None


# Numbers with and without units


def _quantity(found: Sequence[Token], at: int) -> Amount | None:
    start = at
    currency = found[at].text if found[at].text in CURRENCIES else ""
    if currency:
        start += 1
    if not currency and _lower(found, at) == "half" and _lower(found, at + 1) in ("a", "an"):
        if (unit := _unit(found, at + 2)) is not None:
            return Amount("quantity", _key(Fraction(1, 2), unit[0]), 2 + unit[1])
        return None
    if not currency and _lower(found, at) in ("a", "an"):
        if _lower(found, at + 1) == "dozen":
            return Amount("quantity", _key(Fraction(12), ""), 2)
        follows = _lower(found, at + 1)
        if follows in _LONE_UNITS and _lower(found, at - 1) not in _RATES:
            return Amount("quantity", _key(Fraction(1), follows), 2)
        if follows not in ("hundred", "thousand", "million", "billion"):
            return None
        start += 1
    number = _number(found, start)
    if number is None:
        return None
    value, end, spelling = number
    if currency:
        return Amount("quantity", _key(value, currency), end - at)
    if (unit := _unit(found, end)) is not None:
        return Amount("quantity", _key(value, unit[0]), end + unit[1] - at)
    if spelling is not None:
        return Amount("quantity", spelling, end - at)
    return Amount("quantity", _key(value, ""), end - at)


def _key(value: Fraction, unit: str) -> str:
    if not unit:
        return str(value)
    base, factor, _ = UNITS.get(unit, (unit, Fraction(1), unit))
    return f"{value * factor} {base}"


def _number(found: Sequence[Token], at: int) -> tuple[Fraction, int, str | None] | None:
    """Value, the token behind it, and the spelling where that matters: 3.10 may be a version."""
    token = _at(found, at)
    if token is None:
        return None
    if token.kind == "number":
        text = token.text.replace(",", "")
        if text.endswith("/0") or re.search(r"/0+$", text):
            return None
        whole, slash, parts = text.partition("/")
        value = Fraction(whole) / (Fraction(parts) if slash else 1)
        end = at + 1
        follows = _at(found, end)
        if follows and follows.glued and follows.text == "M":
            return value * 10**6, end + 1, None
        if follows and follows.glued and follows.lower in _SUFFIXES:
            return value * _SUFFIXES[follows.lower], end + 1, None
        if follows and follows.lower in _SCALES:
            return value * _SCALES[follows.lower], end + 1, None
        return value, end, text if "." in text else None
    return _spelled(found, at)


def _spelled(found: Sequence[Token], at: int) -> tuple[Fraction, int, None] | None:
    """Number words: "two hundred and five thousand"."""
    total = group = 0
    end = at
    last = 10**15
    seen = False
    while (word := _lower(found, end)) and found[end].kind == "word":
        if word in _SMALL and (not seen or last >= 20):
            group, last = group + _SMALL[word], 1
        elif word in _TENS and (not seen or last >= 100):
            group, last = group + _TENS[word], 20
        elif word == "hundred":
            group, last = max(group, 1) * 100, 100
        elif word in _SCALES:
            total, group, last = total + max(group, 1) * _SCALES[word], 0, 10**3
        elif word == "and" and last >= 100 and seen and _lower(found, end + 1) in _SMALL | _TENS:
            pass
        else:
            break
        seen = True
        end += 1
    return (Fraction(total + group), end, None) if seen else None


def _unit(found: Sequence[Token], at: int) -> tuple[str, int] | None:
    """A unit's name and its tokens, from `at`."""
    token = _at(found, at)
    if token is None or token.kind not in ("word", "symbol"):
        return None
    if token.lower in ("degree", "degrees", "°"):
        scale = _at(found, at + 1)
        if scale and scale.text in ("C", "F"):
            return CASED[scale.text], 2
        if scale and scale.lower in ("celsius", "fahrenheit", "centigrade"):
            return scale.lower, 2
        return token.lower, 1
    if token.lower in ("square", "cubic") and _lower(found, at + 1) in UNITS:
        return f"{token.lower} {UNITS[_lower(found, at + 1)][2]}", 2
    if token.text in CASED and (token.text != "K" or token.glued):
        return CASED[token.text], 1
    if token.lower == "in" and token.glued:
        return "inch", 1
    if token.lower not in UNITS:
        return None
    # A lone letter is a unit when it is written at the number, or in the usual way behind it.
    if (
        len(token.text) == 1
        and token.text.isalpha()
        and not token.glued
        and token.text not in "mgslhVW"
    ):
        return None
    short = UNITS[token.lower][2]
    per = _lower(found, at + 1) in ("per", "an", "a")
    if per and short in SPEEDS and _lower(found, at + 2) == ("second" if short == "m" else "hour"):
        return SPEEDS[short], 3
    return token.lower, 1
