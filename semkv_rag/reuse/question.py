"""Which tokens of a prompt are its question, when nobody says so.

The question is the text behind the last stored chunk. It has at least `LEAST` tokens, because a prompt
may end with a chunk and a template's few tokens. It has at most `MOST` tokens, the prompt's last ones,
because each costs as much as a recomputed token. If the text is longer, only these are read, as though
they stood right behind the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semkv_rag.reuse.tokens import TokenArray

LEAST = 8
MOST = 64


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens that a query-aware selector asks with, and where they are put.

    Attributes:
        tokens: the last of the prompt's.
        position: of the first of them; the tokens before are those of the prompt up to there.
    """

    tokens: tuple[int, ...]
    position: int

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.position + len(self.tokens)


def find_question(
    prompt: Sequence[int] | TokenArray, covered: int, wanted: int | None = None
) -> Question:
    """The question of a prompt whose first `covered` tokens are blended.

    Args:
        prompt: its tokens; those below 0 stand for images, and no question reaches beyond one.
        covered: less than the prompt's length.
        wanted: how many tokens the question has; None: by the rule above.
    """
    behind = len(prompt) - covered
    count = min(max(behind, LEAST), MOST) if wanted is None else wanted
    tokens: list[int] = []
    for token in reversed(prompt[-count:]):
        if token < 0:
            break
        tokens.append(int(token))
    position = covered - max(len(tokens) - behind, 0)
    return Question(tuple(reversed(tokens)), position)
