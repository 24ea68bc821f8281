"""A token map for a terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from semkv_rag.token_map.html import KINDS
from semkv_rag.token_map.records import Kind, TokenMap

STYLES: Final[dict[Kind, str]] = {
    "cached": "black on bright_black",
    "exact": "black on green",
    "reused": "black on bright_blue",
    "recomputed": "black on yellow",
    "computed": "",
}


def renderable(
    shown: TokenMap, facts: Sequence[tuple[str, str]], reason: str | None = None
) -> RenderableType:
    """The prompt coloured by what became of each token, a legend, and the chunks.

    Args:
        facts: of the request, what and how much, as texts.
        reason: in words, why nothing was reused.
    """
    counts = shown.counts()
    legend = Text("  ").join(
        Text.assemble(
            (" ■ " if kind == "computed" else "   ", STYLES[kind]), f" {told} {counts[kind]:,}"
        )
        for kind, told in KINDS.items()
        if counts[kind]
    )
    body = Text()
    for text, kind, _, _ in shown.parts():
        body.append(text, STYLES[kind])
    parts: list[RenderableType] = [
        legend,
        Text(" · ".join(f"{what} {much}" for what, much in facts), "dim"),
    ]
    if reason:
        parts.append(Text(reason, "italic"))
    parts += [Text(), body]
    if shown.spans:
        table = Table("chunk", "document", "tokens", "computed again", box=None, pad_edge=False)
        for number, span in enumerate(shown.spans, 1):
            again = sum(end - begin for begin, end in span.recomputed)
            told = "exact" if span.exact else f"{again:,}"
            name = Text(span.source or span.chunk_id[:12])  # no markup of a document's name
            table.add_row(str(number), name, f"{span.begin:,} to {span.end - 1:,}", told)
        parts += [Text(), table]
    return Group(*parts)
