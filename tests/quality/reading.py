"""A second reading of the yardstick's contexts: from the words alone, sentence by sentence."""

from __future__ import annotations

from workbench.quality import words

PROPER = frozenset(words.PROPER + words.HELD_PROPER)


class Missing(Exception):
    """Something is referred to that the tokens don't tell."""


def read(tokens: list[int]) -> dict[int, tuple[int, ...] | None]:
    """Each name's value; None where it can't be told from these tokens."""
    found: dict[int, tuple[int, ...] | None] = {}
    proper: int | None = None
    sentence: list[int] = []
    for token in tokens:
        if token not in words.ENDS:
            sentence.append(token)
            continue
        if sentence[0] not in (words.THE, words.SAW):
            name, verb, *rest = sentence
            if name in PROPER:
                proper = name
            try:
                found[name] = _value(verb, rest, found, proper)
            except Missing:
                found[name] = None
        mentioned = [word for word in sentence if word in PROPER]
        proper = mentioned[-1] if mentioned else proper
        sentence = []
    assert not sentence, "a context ends with a sentence"
    return found


def _value(
    verb: int, rest: list[int], found: dict[int, tuple[int, ...] | None], proper: int | None
) -> tuple[int, ...]:
    def look(word: int | None) -> tuple[int, ...]:
        value = None if word is None else found.get(word)
        if value is None:
            raise Missing
        return value

    if verb == words.IS:
        return tuple(rest)
    if verb == words.LIKE:
        (word,) = rest
        return look(proper if word == words.IT else word)
    assert verb == words.HAS
    one, two = rest
    return look(one)[0], look(two)[0]
