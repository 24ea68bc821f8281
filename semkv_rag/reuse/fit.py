"""How well the context that a chunk was computed behind fits the place where it stands in a prompt.

It decides between stored chunks with the same tokens. The KV of the chunk whose context fits best is the
nearest to what the prompt itself would give.
"""

from __future__ import annotations

from typing import NamedTuple

from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.reuse.windows import Tokens

LEAST = 8
"""Fewer tokens in common say nothing: many texts end with the same full stop and empty line."""

NEAR = 8
"""So many tokens may stand between a neighbour and the chunk, or be missing: what a template writes
between two chunks, and what a tokenizer merges with it."""


class Rank(NamedTuple):
    """How well a context fits; of two, the lower is the better.

    Attributes:
        inexact: whether the prompt has something else to the chunk's left.
        fitting: `fitting` tokens, below 0.
        length: of the context, below 0: a chunk that has only ever seen a short prompt prefix is a
            stranger behind other text, more so than one that has seen some other text
            (benchmarks/quality_real).
    """

    inexact: bool
    fitting: int
    length: int


def rank(context: TokenArray, prompt: Tokens, at: int) -> Rank:
    """How a chunk's context fits a place: exact before all, then by tokens that fit, then the longer.

    Args:
        context: what the chunk was computed behind, [context tokens].
        prompt: [tokens].
        at: where the chunk's first token stands in the prompt; below 0 when its start is cut off.
    """
    count = fitting(context, prompt, at)
    return Rank(not count == at == len(context), -count, -len(context))


def fitting(context: TokenArray, prompt: Tokens, at: int) -> int:
    """How many tokens of the context stand before `at` too, side by side up to its end or nearly so.

    The longest of these: what they have in common right before the chunk; a common run that holds the
    context's 8 tokens before its last 8, at most 8 tokens from their distance to the chunk. A run
    shorter than 8 tokens counts only when it is the whole context.
    """
    if at <= 0 or not len(context):
        return 0
    most = 0
    if context[-1] == prompt[at - 1]:
        most = _common_end(context, prompt[:at])
        if most < min(LEAST, len(context)):
            most = 0
    edge = NEAR + LEAST
    if most < len(context) and len(context) >= edge:
        first = max(0, at - NEAR - edge)
        starts = prompt[first : at - LEAST + 1] == context[-edge]
        for start in (first + starts.nonzero()[0]).tolist():
            ahead = _common_start(context[-edge:], prompt[start:at])
            if ahead >= LEAST:
                most = max(most, ahead + _common_end(context[:-edge], prompt[:start]))
    return most


def _common_end(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    differ = one[len(one) - length :] != other[len(other) - length :]
    return int(differ[::-1].argmax()) if differ.any() else length


def _common_start(one: Tokens, other: Tokens) -> int:
    return _common_end(one[::-1], other[::-1])
