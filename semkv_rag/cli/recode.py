"""`semkv recode`: stored chunks to another codec, in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from semkv_rag.cli import options
from semkv_rag.cli.output import INTERRUPTED, in_words, print_json, say, size_in_words
from semkv_rag.cli.progress_bar import LINE_S
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore
from semkv_rag.store.codecs import codec_named


def recode_command(
    store: options.Store,
    codec: options.Codec,
    index_url: options.IndexUrl = None,
    namespace: options.AnyNamespace = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Only this model: its fingerprint, or what semkv info shows of it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how many chunks would be recoded.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Convert stored chunks to another codec, in place.

    From plain to any; what a lossy codec left out cannot be brought back. Engines may use the store
    meanwhile. The same command again goes on where it was stopped. Exit code 1: chunks could not be
    recoded.
    """
    codec_named(codec)
    with options.open_store(store, index_url, read_only=dry_run) as kv_store, _showing() as shown:
        fingerprint = None if model is None else _fingerprint(kv_store, model)
        try:
            report = kv_store.recode(
                codec, model=fingerprint, namespace=namespace, dry_run=dry_run, progress=shown
            )
        except KeyboardInterrupt:
            say("Stopped. What was recoded stays so; the same command goes on from here.")
            raise typer.Exit(INTERRUPTED) from None
    for id_, reason in report.failures:
        say(f"{id_[:16]}: {reason}")
    if as_json:
        print_json(asdict(report))
    elif dry_run:
        typer.echo(
            f"{in_words(report.recoded, 'chunk')} to recode, {report.unchanged:,} are {codec};"
            f" {size_in_words(report.bytes_before)} now"
        )
    else:
        typer.echo(
            f"{in_words(report.recoded, 'chunk')} recoded, {report.unchanged:,} were {codec}:"
            f" {size_in_words(report.bytes_before)} before, {size_in_words(report.bytes_after)} now"
        )
    if report.failures:
        say("Damaged chunks: semkv verify --repair drops them, semkv precompute makes them again")
        raise typer.Exit(1)


def _fingerprint(store: KVStore, begin: str) -> str:
    """The model of the store whose fingerprint begins so.

    Raises:
        OptionError: there is not just one.
    """
    found = [one.fingerprint for one in store.models() if one.fingerprint.startswith(begin)]
    if len(found) != 1:
        raise OptionError(
            f"--model {begin}: {len(found)} models of the store begin so (semkv info)"
        )
    return found[0]


@contextmanager
def _showing() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; a line now and then where that is no terminal."""
    console = Console(stderr=True)
    said_at = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("Recoding", total=None)

        def shown(done: int, total: int) -> None:
            nonlocal said_at
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said_at > LINE_S:
                said_at = time.monotonic()
                say(f"Recoding: {done:,}/{total:,} chunks")

        yield shown
