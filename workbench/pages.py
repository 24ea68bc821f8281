"""What tests and the site read of a page of the documentation: its tables and its code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_CODE = re.compile(r"`([^`]+)`")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        language: as the fence names it, empty where it names none.
        source: its lines.
        line: the first of them in the file, from 1 on.
        not_run: the reason of a comment `<!-- not run: … -->` right before it, or None.
    """

    language: str
    source: str
    line: int
    not_run: str | None


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in their order."""
    found = list[Block]()
    reason: str | None = None
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (mark := _NOT_RUN.search(token.content)):
            reason = mark[1]
        elif token.type == "fence":
            assert token.map is not None
            found.append(Block(token.info.strip(), token.content, token.map[0] + 2, reason))
            reason = None
        elif token.nesting >= 0:
            reason = None
    return found


def tables(page: Path, heading: str) -> list[list[list[str]]]:
    """The tables of a section, each a list of rows of cells as they are written, without the titles.

    Args:
        heading: the section's, as it is written; sections below it do not count.
    """
    found = list[list[list[str]]]()
    here = False
    tokens = _MARKDOWN.parse(page.read_text(encoding="utf-8"))
    for place, token in enumerate(tokens):
        match token.type:
            case "heading_open":
                here = tokens[place + 1].content == heading
            case "table_open" if here:
                found.append([])
            case "tr_open" if here:
                found[-1].append([])
            case "td_open" if here:
                found[-1][-1].append(tokens[place + 1].content)
    return [[row for row in rows if row] for rows in found]


def entries(page: Path, heading: str) -> set[str]:
    """The names in code in the first column of a section's tables."""
    cells = [row[0] for rows in tables(page, heading) for row in rows]
    return {name for cell in cells for name in _CODE.findall(cell)}
