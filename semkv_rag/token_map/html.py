"""A token map as HTML: one element with its own style, no script, nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from semkv_rag.token_map.records import Kind, MappedSpan, TokenMap

KINDS: Final[dict[Kind, str]] = {
    "cached": "in vLLM's prefix cache",
    "exact": "loaded, exact",
    "reused": "loaded, as stored",
    "recomputed": "loaded, computed again",
    "computed": "computed",
}
"""What a reader is told of each kind, in the order of the legend."""

STYLE: Final = files("semkv_rag.token_map").joinpath("style.css").read_text(encoding="utf-8")


def element(shown: TokenMap, facts: Sequence[tuple[str, str]], reason: str | None = None) -> str:
    """One `<div>` with the prompt coloured by what became of each token.

    Args:
        facts: of the request, what and how much, as texts.
        reason: in words, why nothing was reused.
    """
    counts, total = shown.counts(), len(shown.pieces)
    bar = "".join(
        f'<span class="{kind}" style="flex:{counts[kind]}" title="{told}: {counts[kind]:,}"></span>'
        for kind, told in KINDS.items()
        if counts[kind]
    )
    legend = "".join(
        f'<li><i class="{kind}"></i>{told}: <b>{counts[kind]:,}</b> ({counts[kind] / total:.0%})</li>'
        for kind, told in KINDS.items()
        if counts[kind]
    )
    said = "".join(f"<li>{escape(what)}: <b>{escape(much)}</b></li>" for what, much in facts)
    return (
        f'<div class="semkv"><style>{STYLE}</style><b>{total:,} tokens of the prompt</b>'
        f'<div class="bar">{bar}</div><ul>{legend}</ul><ul class="soft">{said}</ul>'
        + (f'<p class="why">{escape(reason)}</p>' if reason else "")
        + f"<pre>{_text(shown)}</pre>{_chunks(shown.spans)}</div>"
    )


def page(shown: TokenMap, facts: Sequence[tuple[str, str]], reason: str | None = None) -> str:
    """A whole HTML page with that element."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>semkv: a prompt</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        " 'unsafe-inline'\"></head><body>" + element(shown, facts, reason) + "</body></html>"
    )


def _text(shown: TokenMap) -> str:
    numbers = {span: number for number, span in enumerate(shown.spans, 1)}
    parts, last = [], None
    for text, kind, span, score in shown.parts():
        if span is not None and span is not last:
            parts.append(f'<b class="chunk">{numbers[span]}</b>')
        last = span
        told = KINDS[kind] + (f"; chunk {numbers[span]}" if span else "")
        shade = ""
        if score and kind in ("reused", "recomputed"):
            told += f"; wanted {score} of 9"
            # Of those that stay as they are, the less wanted are paler.
            strength = f"color-mix(in srgb,var(--reused) {40 + 6 * int(score)}%,transparent)"
            shade = f' style="background:{strength}"' if kind == "reused" else ""
        parts.append(f'<span class="{kind}" title="{escape(told)}"{shade}>{escape(text)}</span>')
    return "".join(parts)


def _chunks(spans: Sequence[MappedSpan]) -> str:
    if not spans:
        return ""
    rows = "".join(
        f'<tr><td class="n">{number}</td><td>{escape(span.source or span.chunk_id[:12])}</td>'
        f'<td class="n">{span.begin:,} to {span.end - 1:,}</td>'
        f"<td>{'exact' if span.exact else f'behind {span.context_tokens:,} other tokens'}</td>"
        f'<td class="n">{sum(b - a for a, b in span.recomputed):,}</td>'
        f"<td>{_when(span.stored_at)}</td></tr>"
        for number, span in enumerate(spans, 1)
    )
    return (
        '<table><thead><tr><th class="n">chunk</th><th>document</th><th class="n">tokens</th>'
        '<th>stored</th><th class="n">computed again</th><th>on</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _when(stored_at: float | None) -> str:
    if stored_at is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stored_at))
