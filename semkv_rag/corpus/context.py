"""What stands to the left of a chunk while its KV is computed: its variants, one for each mode.

* `head`: what every prompt starts with.
* `left`: the head and the chunk before it in its document.
* `similar`: the head and the chunk of the corpus that is most like it (FusionRAG, arXiv 2601.12904).

The KV of these tokens is dropped. All variants of a chunk are stored side by side, and the matcher takes
the one whose context fits a prompt best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from semkv_rag.corpus.similar import MostSimilar
from semkv_rag.corpus.split import tokenize
from semkv_rag.errors import OptionError
from semkv_rag.reuse.tokens import TokenArray

ContextMode: TypeAlias = Literal["head", "left", "similar"]
CONTEXT_MODES: tuple[ContextMode, ...] = get_args(ContextMode)
DEFAULT_CONTEXT: tuple[ContextMode, ...] = ("head",)

_NEUTRAL = ("\n", ".")
"""Texts whose token may stand first where nothing else does; a tokenizer may drop white space."""


def context_modes(names: Iterable[str]) -> tuple[ContextMode, ...]:
    """The modes with these names, each once, in the order of `CONTEXT_MODES`.

    Raises:
        OptionError: there is no such mode, or none is named.
    """
    named = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in named if name not in CONTEXT_MODES]:
        raise OptionError(f"context {unknown[0]!r}: use {', '.join(CONTEXT_MODES)}")
    if not named:
        raise OptionError(f"no context: use one or more of {', '.join(CONTEXT_MODES)}")
    return tuple(mode for mode in CONTEXT_MODES if mode in named)


def head_tokens(tokenizer: Any, head: str = "") -> TokenArray:
    """What every chunk is computed behind, [tokens]: the head with what the tokenizer puts before it.

    Where that is nothing, one neutral token. Whatever stands at position 0 takes the attention that
    other tokens have no use for, and its KV is like no other's: no chunk's first token is to be it.
    (StreamingLLM, arXiv 2309.17453; a prefix before every chunk: APE, arXiv 2502.05431.)
    """
    tokens = tokenize(tokenizer, head, special=True)
    for text in _NEUTRAL:
        if not tokens.size:
            tokens = tokenize(tokenizer, text)[-1:]
    return tokens


class Contexts:
    """The contexts of a run's chunks.

    Args:
        modes: from `context_modes`.
        head: from `head_tokens`.
        longest: the most tokens of context and chunk together. Of a neighbour that is too long for it
            the last tokens are taken.
        similar: finds the similar chunks of mode `similar`; only asked for in that mode.
    """

    def __init__(
        self,
        modes: Sequence[ContextMode],
        head: TokenArray,
        longest: int,
        similar: MostSimilar | None = None,
    ) -> None:
        self.head = head
        self._modes = modes
        self._longest = longest
        self._similar = similar

    def variants(self, chunks: Sequence[TokenArray]) -> Iterator[tuple[TokenArray, TokenArray]]:
        """Each variant of a document's chunks as (tokens, context), chunk by chunk, none twice."""
        for number, tokens in enumerate(chunks):
            given: set[bytes] = set()
            for mode in self._modes:
                neighbour = self._neighbour(mode, chunks, number)
                context = self.head if neighbour is None else self._behind(neighbour, tokens)
                if context.tobytes() not in given:
                    given.add(context.tobytes())
                    yield tokens, context

    def _neighbour(
        self, mode: ContextMode, chunks: Sequence[TokenArray], number: int
    ) -> TokenArray | None:
        if mode == "left":
            return chunks[number - 1] if number else None
        if mode == "similar" and self._similar is not None:
            return self._similar.to(chunks[number])
        return None

    def _behind(self, neighbour: TokenArray, tokens: TokenArray) -> TokenArray:
        room = max(0, self._longest - len(self.head) - len(tokens))
        return np.concatenate((self.head, neighbour[max(0, len(neighbour) - room) :]))
