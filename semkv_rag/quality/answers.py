"""Right or wrong: answers against the ones that are known, as SQuAD counts them.

Lower case, without punctuation and articles, blanks as one; an answer is as good as the known one that it
fits best (Rajpurkar et al., arXiv 1606.05250, section 6.1).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """The text as it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, known: Sequence[str]) -> float:
    """1 when the answer is one of the known ones, else 0."""
    return float(any(normalise(answer) == normalise(one) for one in known))


def f1(answer: str, known: Sequence[str]) -> float:
    """The best F1 of the answer's words with a known answer's, 0 to 1."""
    return max((_f1(normalise(answer).split(), normalise(one).split()) for one in known), default=0)


def _f1(said: Sequence[str], meant: Sequence[str]) -> float:
    if not said or not meant:
        return float(said == meant)
    common = (Counter(said) & Counter(meant)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(meant)
    return 2 * precision * recall / (precision + recall)
