"""docs/cli.md has every command and option that there is, and none besides."""

import re
from pathlib import Path

import pytest
import typer

from semkv_rag.cli import app

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
SECTIONS = dict(re.findall(r"^## semkv (\w+)\n(.*?)(?=^## |\Z)", DOCS.read_text(), re.M | re.S))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_has_its_section() -> None:
    assert set(SECTIONS) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_its_section(command: str) -> None:
    # What a table's first column names in code; text may speak of other commands' options.
    cells = re.findall(r"^\| (`-.*?`) \|", SECTIONS[command], re.M)
    documented = {option for cell in cells for option in re.findall(r"`(-[-a-z]+)`", cell)}
    options = {
        name
        for parameter in COMMANDS[command].params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }
    assert documented == options - {"--help"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_are_those_of_the_command(command: str) -> None:
    defaults = {
        parameter.opts[0]: parameter.default
        for parameter in COMMANDS[command].params
        if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool)
    }
    told = dict(re.findall(r"^\| `(--[-a-z]+)` \|.*; ([\d.]+) \|$", SECTIONS[command], re.M))
    assert {name: float(value) for name, value in told.items()} == {
        name: float(value) for name, value in defaults.items() if name in told
    }
