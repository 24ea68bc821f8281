"""The commands on the pages are understood by the programs that they call."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from workbench.cli_page import commands
from workbench.pages import blocks
from workbench.settings import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMED = (
    "keys.json",
    "operator.key",
    "prefix.txt",
    "questions.jsonl",
    "faq.md",
    "template",
    "long.txt",
)
"""Files that commands on the pages name; what they hold does not matter here."""
OF_THE_SYSTEM = {"install", "curl", "pip-audit"}


def lines(page: Path) -> Iterator[list[str]]:
    """The words of each command in a page's bash, and behind a prompt in its other blocks."""
    for block in blocks(page):
        text = block.source.replace("\\\n", " ")
        if block.language != "bash":
            text = "\n".join(re.findall(r"^\$ (.*)", text, re.M))
        for line in text.splitlines():
            for command in line.split(" && "):
                if words := shlex.split(command, comments=True):
                    yield words


ALL = [
    pytest.param(words, id=f"{page.name} {' '.join(words)[:60]}")
    for page in PAGES
    for words in lines(page)
]


@pytest.mark.parametrize("words", ALL)
def test_the_program_understands_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match words:
        case ["semkv", verb, *rest]:
            understood_by_semkv(verb, rest, tmp_path, monkeypatch)
        case ["make", *rest]:
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
            assert {word for word in rest if "=" not in word} <= set(targets)
        case ["python", "-m", module, *_]:
            file = ROOT / Path(*module.split("."))
            assert file.with_suffix(".py").exists() or (file / "__main__.py").exists()
        case ["python", file, *rest]:
            source = (ROOT / file).read_text(encoding="utf-8")
            options = {word for word in rest if word.startswith("--")}
            assert {option for option in options if f'"{option}"' not in source} <= shared_options()
        case ["pip", "install", *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
                "project"
            ]
            for package in packages:
                extras = re.fullmatch(r"semkv-rag\[(.+)\]", package)
                assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])
        case ["pip", "download", *_]:
            pass
        case _:
            assert words[0] in OF_THE_SYSTEM | {"openssl"}, words


def understood_by_semkv(
    verb: str, rest: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in (*NAMED, *(word for word in rest if word.endswith("/"))):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True) if name.endswith("/") else path.touch()
    for word in rest:
        if "/" in word and word.endswith((".json", ".jsonl", ".txt")):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).touch()
    command = commands()[verb]
    context: typer.Context = command.make_context(
        f"semkv {verb}", [word for word in rest if word != "…"]
    )
    if verb == "serve":
        make_arg_parser(FlexibleArgumentParser()).parse_args(
            [context.params["model"], *context.args]
        )


def shared_options() -> set[str]:
    """Options that benchmarks read by a helper of `workbench`."""
    sources = "".join(file.read_text() for file in (ROOT / "workbench").rglob("*.py"))
    return set(re.findall(r'"(--[-a-z]+)"', sources))
