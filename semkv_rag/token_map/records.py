"""What became of each token of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["cached", "exact", "reused", "recomputed", "computed"]
"""Where a token's KV came from: vLLM's prefix cache (cached); the store, behind the stored text (exact)
or behind another one (reused); computed again, though it is stored (recomputed); computed."""


@dataclass(frozen=True, slots=True)
class MappedSpan:
    """Tokens of the prompt that are stored, all of one chunk.

    Attributes:
        begin: the position of the first one in the prompt.
        end: the position behind the last one.
        exact: whether all to their left is the text that the chunk was stored behind.
        chunk_id: the chunk.
        recomputed: positions that were computed again, [begin, end) of each run.
        scores: how much the selector wanted each token computed: a digit a token, 0 to 9, by rank. Empty
            where nothing was picked by a look at the KV.
        source: the document that the chunk is of; None where that is not known.
        context_tokens: how many tokens the chunk was stored behind.
        stored_at: when, in seconds since the epoch; None where that is not known.
    """

    begin: int
    end: int
    exact: bool
    chunk_id: str
    recomputed: tuple[tuple[int, int], ...] = ()
    scores: str = ""
    source: str | None = None
    context_tokens: int = 0
    stored_at: float | None = None


@dataclass(frozen=True, slots=True)
class TokenMap:
    """A prompt, token by token.

    Attributes:
        pieces: the text of each token; a character of several tokens is with the last of them.
        cached_tokens: the first ones, which vLLM's prefix cache had.
        spans: what is stored of the prompt, in its order.
    """

    pieces: tuple[str, ...] = ()
    cached_tokens: int = 0
    spans: tuple[MappedSpan, ...] = ()

    def kinds(self) -> list[Kind]:
        """What became of each token."""
        kinds: list[Kind] = ["computed"] * len(self.pieces)
        for span in self.spans:
            stored: Kind = "exact" if span.exact else "reused"
            kinds[span.begin : span.end] = [stored] * (span.end - span.begin)
            for begin, end in span.recomputed:
                kinds[begin:end] = ["recomputed"] * (end - begin)
        kinds[: self.cached_tokens] = ["cached"] * self.cached_tokens
        return kinds

    def counts(self) -> Counter[Kind]:
        """How many tokens are of each kind."""
        return Counter(self.kinds())

    def parts(self) -> Iterator[tuple[str, Kind, MappedSpan | None, str]]:
        """Neighbours of which the same became, as text, with their span and score (a digit or empty)."""
        spans: list[MappedSpan | None] = [None] * len(self.pieces)
        for one in self.spans:
            spans[one.begin : one.end] = [one] * (one.end - one.begin)
        text, before = "", None
        for at, (piece, kind) in enumerate(zip(self.pieces, self.kinds(), strict=True)):
            span = spans[at]
            score = span.scores[at - span.begin] if span is not None and span.scores else ""
            what = (kind, span, score)
            if before is not None and what != before:
                yield (text, *before)
                text = ""
            text, before = text + piece, what
        if before is not None:
            yield (text, *before)

    def to_mapping(self) -> dict[str, Any]:
        """The map as plain JSON values."""
        spans = [
            asdict(span) | {"recomputed": [list(run) for run in span.recomputed]}
            for span in self.spans
        ]
        return {"pieces": list(self.pieces), "cached_tokens": self.cached_tokens, "spans": spans}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TokenMap:
        """The map out of a report's JSON."""
        spans = tuple(
            MappedSpan(**span | {"recomputed": tuple((a, b) for a, b in span["recomputed"])})
            for span in values["spans"]
        )
        return cls(tuple(values["pieces"]), values["cached_tokens"], spans)
