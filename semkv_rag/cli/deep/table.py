"""The results as a table that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from semkv_rag.cli.deep.result import Result
from semkv_rag.cli.output import print_table, size_in_words

RATE = "_bytes_per_s"


def print_results(about: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Print what was checked on, a row for each result, and how to mend what is wrong."""
    typer.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))
    rows = [(one.check, one.case, one.status, _message_and_figures(one)) for one in results]
    print_table(("check", "case", "result", "figures"), rows)
    for one in results:
        if one.fix:
            typer.echo(f"{one.check}, {one.case}: to mend it: {one.fix}")


def _message_and_figures(result: Result) -> str:
    figures = [in_words_of(name, value) for name, value in result.figures.items()]
    return ", ".join([*([result.message] if result.message else []), *figures])


def in_words_of(name: str, value: Any) -> str:
    """A figure with its name and unit: `plain 812 ms`, `into cache 1.2 GB/s`."""
    if value is None:
        return f"{name.replace('_', ' ')} unknown"
    if name.endswith(RATE):
        return f"{name.removesuffix(RATE).replace('_', ' ')} {size_in_words(value)}/s"
    if name == "bytes":
        return size_in_words(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    if isinstance(value, float) and 1000 <= value < 1e9:
        number = f"{value:,.0f}"
    if name == "ms":
        return f"{number} ms"
    for ending, unit in (("_ms", " ms"), ("_nats", " nats")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')} {number}{unit}"
    return f"{name.replace('_', ' ')} {number}"
