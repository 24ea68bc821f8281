"""What commands print: data on stdout, all else on stderr.

Engine processes and libraries print as they like; inside `data_only_stdout` that goes to stderr too,
so that what a script reads from a command is only what the command says.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semkv_rag.errors import OptionError

if TYPE_CHECKING:
    from rich.console import RichCast

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""What libraries say for their developers stays unsaid, here and in the engine's processes."""

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped."""


def print_json(data: Any) -> None:
    """Print `data`, plain JSON values, as the command's whole output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header, columns aligned, nothing cut; numbers to the right."""
    texts = [[*map(str, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    for line, cells in zip([header, *texts], [header, *rows], strict=True):
        aligned = [
            text.rjust(width) if isinstance(cell, int | float) else text.ljust(width)
            for text, cell, width in zip(line, cells, widths, strict=True)
        ]
        typer.echo("  ".join(aligned).rstrip())


def print_rich(shown: RichCast) -> None:
    """Print with colours, where the terminal has them."""
    from rich.console import Console

    Console(highlight=False).print(shown)


def check_writable(option: str, path: Path | None) -> None:
    """Make sure that a file can be written later, before there is work to be lost; None is no file.

    Raises:
        OptionError: it cannot.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OptionError(f"{option} {path} cannot be written: name another file")


def say(text: str) -> None:
    """Tell the user something that is not data."""
    typer.echo(text, err=True)


def in_words(count: int, thing: str) -> str:
    """`1 chunk`, `2,048 chunks`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def size_in_words(count_bytes: float) -> str:
    """Bytes as people read them, in powers of 1000: `51.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count_bytes) < 1000:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:,.1f} TB"


@contextmanager
def data_only_stdout() -> Iterator[None]:
    """While inside, what anything prints to stdout, child processes included, goes to stderr."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # it is imported, and its variable read
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
