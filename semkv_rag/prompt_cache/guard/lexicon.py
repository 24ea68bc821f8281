"""The guard's words, read from `lexicon.toml`, which says what each list is for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_VOWELS = frozenset("aeiouy")
_OPPOSING = ("un", "non", "in", "im", "il", "ir", "dis")


def _by_form(classes: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {form: name for name, forms in classes.items() for form in forms}


class Lexicon:
    """The lists in the form they are looked up in. Raises ValueError for lists that contradict."""

    def __init__(self, lists: Mapping[str, Any]) -> None:
        self.framing = _phrases(lists["framing"])
        self.framing_before_question = _phrases(lists["framing_before_question"])
        self.framing_before_noun = _phrases(lists["framing_before_noun"])
        self.framing_joints = frozenset(lists["framing_joints"])
        self.courtesies = frozenset(lists["courtesies"])
        self.ignored = frozenset(lists["ignored"])
        self.weak_markers = _by_form(lists["prepositions"])
        self.strong_markers = frozenset(lists["markers"]["strong"])
        self.temporal = frozenset(lists["temporal"]["words"])
        self.questions = _by_form(lists["questions"])
        self.negations = _by_form(lists["negations"])
        self.quantifiers = _by_form(lists["quantifiers"])
        self.modals = _by_form(lists["modals"])
        self.persons = _by_form(lists["persons"])
        self.phrases = {tuple(k.split()): tuple(v.split()) for k, v in lists["phrases"].items()}
        self.longest_phrase = max(map(len, self.phrases))
        self.past_forms = frozenset(lists["irregular"]["past"].values())
        self.participles = self.past_forms | {
            form for forms in lists["irregular"]["forms"].values() for form in forms
        }
        self._whole = frozenset(lists["irregular"]["whole"])
        self._base = _by_form(lists["irregular"]["forms"]) | {
            past: base for base, past in lists["irregular"]["past"].items()
        }
        self._synonyms: dict[str, str] = {}
        for line in lists["synonyms"]["lines"]:
            first, *others = [self.stem(word.strip()) for word in line.split(",")]
            for word in (first, *others):
                if self._synonyms.setdefault(word, first) != first:
                    raise ValueError(f"'{word}' stands in two lines of synonyms")
        self._antonyms: dict[str, set[str]] = {}
        for line in lists["antonyms"]["lines"]:
            one, other = (self.canonical(word.strip()) for word in line.split("|"))
            if one == other:
                raise ValueError(f"'{line}' are synonyms and antonyms")
            self._antonyms.setdefault(one, set()).add(other)
            self._antonyms.setdefault(other, set()).add(one)
        self.measures = frozenset(self.canonical(word) for word in lists["measures"]["words"])

    def canonical(self, word: str) -> str:
        """What all forms and synonyms of a lower-case word have in common."""
        stem = self.stem(word)
        return self._synonyms.get(stem, stem)

    def opposites(self, word: str) -> set[str]:
        """What stands for the opposite of a canonical word; may hold what is no word."""
        longer = {prefix + word for prefix in _OPPOSING}
        shorter = {word.removeprefix(prefix) for prefix in _OPPOSING if word.startswith(prefix)}
        return self._antonyms.get(word, set()) | longer | shorter

    def stem(self, word: str) -> str:
        """A lower-case word without the endings of number, tense and participle."""
        word = self._base.get(word, word)
        if word in self._whole or len(word) < 4:
            return word
        for ending, instead in (("ies", "y"), ("ied", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"),
                                ("shes", "sh"), ("ing", ""), ("ed", ""), ("s", "")):  # fmt: skip
            if word.endswith(ending) and not word.endswith(
                ("ss", "us", "is")[: 3 * (ending == "s")]
            ):
                cut = word.removesuffix(ending) + instead
                if len(cut) > 2 and _VOWELS & set(cut):
                    return _undoubled(cut) if ending in ("ing", "ed") else cut.removesuffix("e")
                break
        return word.removesuffix("e")


def _undoubled(stem: str) -> str:
    if len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "lsz":
        return stem[:-1]
    return stem.removesuffix("e")


def _phrases(lines: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Split into words, the longest first."""
    return tuple(sorted((tuple(line.split()) for line in lines), key=len, reverse=True))


@cache
def lexicon() -> Lexicon:
    """The package's own."""
    text = (
        files("semkv_rag.prompt_cache.guard").joinpath("lexicon.toml").read_text(encoding="utf-8")
    )
    return Lexicon(tomllib.loads(text))
