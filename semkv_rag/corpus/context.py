"""What stands to the left of a chunk while its KV is computed: its variants, one for each mode.

* `prefix`: the prompt prefix, the text that every prompt starts with.
* `left`: the prompt prefix and its document up to the chunk, of a long document the end of that.

A document's first chunk has nothing before it, and stands behind the prompt prefix and an unrelated
passage: a chunk that has only ever seen a short prompt prefix is a stranger behind other text.

The KV of these tokens is dropped. All variants of a chunk are stored side by side, and the matcher takes
the one whose context fits a prompt best: `prefix` for the first chunk of a prompt, `left` for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from semkv_rag.corpus.split import tokenize
from semkv_rag.errors import OptionError
from semkv_rag.reuse.tokens import TokenArray, token_array

ContextMode: TypeAlias = Literal["prefix", "left"]
CONTEXT_MODES: tuple[ContextMode, ...] = get_args(ContextMode)
DEFAULT_CONTEXT: tuple[ContextMode, ...] = ("prefix", "left")

PASSAGE = (
    "The valley lies between two ranges of hills, and a slow river runs through it from north to "
    "south. People have lived there for a long time. They keep cattle and sheep on the upper slopes, "
    "grow wheat and barley on the flat land, and sell what they do not need at the market in the "
    "town. The town has a square with a fountain, a school, a library and a small museum, where old "
    "tools and photographs are shown. In spring the river is high, and the meadows beside it are "
    "under water for a week or two. In summer the days are warm and the evenings cool; visitors come "
    "to walk, to swim and to fish. Most houses are built of grey stone, with wooden doors and red "
    "tiles. A railway line was opened more than a hundred years ago, and trains still stop four times"
    " a day. The mayor is elected every five years. Last year the council decided to repair the old "
    "bridge, which carries the road to the next village, and to plant trees along the main street. "
    "The work took longer than expected, because the ground was soft, but it was finished before the "
    "first snow fell. Since then traffic has become quieter, and children walk to school again."
)
"""Stands before a document's first chunk. About 200 tokens: of 64, half as much is gained."""

MOST = 2048
"""Tokens of its document that stand before a chunk, at most; beyond that the context starts anew."""
LEAST = 512
"""Tokens that a context starts anew with, in whole chunks. They are computed again: a third of what
follows until the next new start."""

_FOLLOWING = "1"
"""Stands for what follows a prompt prefix. Tokenizers join no white space to a digit."""
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


def prefix_tokens(tokenizer: Any, prefix: str = "") -> TokenArray:
    """What every chunk is computed behind, [tokens]: the prefix and what the tokenizer puts before it.

    Where that is nothing, one neutral token. Whatever stands at position 0 takes the attention that
    other tokens have no use for, and its KV is like no other's: no chunk's first token is to be it.
    (StreamingLLM, arXiv 2309.17453; a shared prefix for all chunks: APE, arXiv 2502.05431.)

    The prefix's last token is the one that it has where a text follows: many tokenizers make one token of
    two line ends at a text's end, and two tokens of them before a word.
    """
    tokens = tokenize(tokenizer, prefix, special=True)
    if prefix:
        followed = tokenize(tokenizer, prefix + _FOLLOWING, special=True)
        if tokenizer.decode([int(followed[-1])]) == _FOLLOWING:
            tokens = followed[:-1]
    first = getattr(tokenizer, "bos_token_id", None)
    if len(tokens) > 1 and tokens[0] == tokens[1] == first:
        tokens = tokens[1:]  # the prefix was taken from a prompt, and has it already
    for text in _NEUTRAL:
        if not tokens.size:
            tokens = tokenize(tokenizer, text)[-1:]
    return tokens


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A chunk as it is stored once.

    Attributes:
        tokens: its own, [tokens].
        context: what stands to its left, [context tokens].
        reference: another context, behind which its V are computed too, to see how much they change
            with what stands before (`semkv_rag.blend.sensitivity`). None where `context` is the prefix.
    """

    tokens: TokenArray
    context: TokenArray
    reference: TokenArray | None = None


class Contexts:
    """The contexts of a run's chunks.

    Args:
        modes: from `context_modes`.
        prefix: from `prefix_tokens`.
        passage: what stands before a document's first chunk, [tokens].
        longest: the most tokens of context and chunk together. Of a text that is too long for it the
            last tokens are taken.
    """

    def __init__(
        self,
        modes: Sequence[ContextMode],
        prefix: TokenArray,
        passage: TokenArray,
        longest: int,
    ) -> None:
        self.prefix = prefix
        self._passage = passage
        self._modes = modes
        self._longest = longest

    def variants(self, chunks: Sequence[TokenArray]) -> Iterator[Variant]:
        """Each variant of a document's chunks, chunk by chunk, none twice."""
        room = self._longest - len(self.prefix)
        for tokens, before in zip(chunks, texts_before(chunks, room), strict=True):
            given: set[bytes] = set()
            for mode in self._modes:
                variant = self._variant(mode, tokens, before if before.size else self._passage)
                if variant.context.tobytes() not in given:
                    given.add(variant.context.tobytes())
                    yield variant

    def _variant(self, mode: ContextMode, tokens: TokenArray, before: TokenArray) -> Variant:
        if mode == "prefix":
            return Variant(tokens, self.prefix)
        room = max(0, self._longest - len(self.prefix) - len(tokens))
        context = np.concatenate((self.prefix, before[max(0, len(before) - room) :]))
        return Variant(tokens, context, self.prefix if len(context) > len(self.prefix) else None)


def texts_before(chunks: Sequence[TokenArray], room: int) -> Iterator[TokenArray]:
    """What of a document stands before each of its chunks, [tokens] each.

    All up to the chunk, so that a prompt which has the document as it is has all of it exactly, and so
    that vLLM's prefix cache holds it when the chunk is computed. Where that would be more than `MOST`
    tokens, only the last chunks of it, of `LEAST` tokens or more together; the texts grow from there.

    Args:
        room: tokens of text and chunk together; one chunk is given in any case.
    """
    first = behind = 0
    for number, tokens in enumerate(chunks):
        if behind > min(MOST, room - len(tokens)):
            least = min(LEAST, room - len(tokens))
            while first < number - 1 and behind - len(chunks[first]) >= least:
                behind -= len(chunks[first])
                first += 1
        yield np.concatenate(chunks[first:number]) if number else token_array([])
        behind += len(tokens)
