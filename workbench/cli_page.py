"""Writes the options of every command into docs/cli.md, as the program has them.

    python -m workbench.cli_page

What stands between a command's two comments is replaced; all else on the page is written by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import typer

from semkv_rag.cli import app
from workbench.settings import ROOT

PAGE = ROOT / "docs" / "cli.md"
_GENERATED = re.compile(
    r"(<!-- generated: semkv (\w+) -->\n).*?(<!-- end of generated -->\n)", re.S
)


def commands() -> Mapping[str, Any]:
    """The program's commands by name, as click has them."""
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def written(page: str) -> str:
    """The page with its generated parts made anew.

    Raises:
        KeyError: a part is of a command that there is not.
    """
    there = commands()
    return _GENERATED.sub(lambda part: part[1] + _command(there[part[2]]) + part[3], page)


def generated(page: str) -> list[str]:
    """The commands that a page has generated parts of, in their order."""
    return [part[2] for part in _GENERATED.finditer(page)]


def _command(command: Any) -> str:
    context = typer.Context(command, info_name=f"semkv {command.name}", terminal_width=200)
    described = (one.get_help_record(context) for one in command.params)
    rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in filter(None, described)]
    lines = [
        *("", "```", command.get_usage(context).removeprefix("Usage: "), "```", ""),
        *(inspect.cleandoc(command.help), ""),
        *("| | |", "|---|---|", *rows, ""),
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("  [", " [")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
