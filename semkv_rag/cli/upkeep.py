"""`semkv rm` and `semkv verify`: taking away from a store, and checking what is in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from semkv_rag.cli import options
from semkv_rag.cli.lifecycle import (
    DryRun,
    Sources,
    StoredModel,
    select_sources,
    stored_model,
    taken_in_words,
)
from semkv_rag.cli.output import in_words, print_json, say, size_in_words
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.store import Taken


def rm_command(
    store: options.Store,
    sources: Sources = None,
    index_url: options.IndexUrl = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"The sources' namespace ({DEFAULT_NAMESPACE} unless given); "
            "without sources: remove all that is in it."
        ),
    ] = None,
    model: StoredModel = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all that is in the store.")
    ] = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> None:
    """Remove documents and the chunks that no other document holds, or all of a namespace or a model.

    With their pins; what is pinned goes, too. Exit code 1: a source is not in the store, or the
    question was not answered with yes.
    """
    if everything and (sources or namespace or model):
        raise typer.BadParameter("--all goes alone", param_hint="--all")
    if not (everything or sources or namespace or model):
        raise typer.BadParameter(
            "name sources, a --namespace, a --model, or --all", param_hint="SOURCE"
        )
    with options.open_store(store, index_url, read_only=dry_run) as kv_store:
        fingerprint = None if model is None else stored_model(kv_store, model)
        names, missing = None, list[str]()
        if sources:
            namespace = namespace or DEFAULT_NAMESPACE
            names, missing = select_sources(kv_store, sources, namespace, fingerprint)
        if names != [] and not (dry_run or yes):
            would = kv_store.lifecycle.remove(fingerprint, namespace, names, dry_run=True)
            _confirm(_question(would, namespace, fingerprint, names))
        taken = kv_store.lifecycle.remove(fingerprint, namespace, names, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(taken)})
    else:
        removed = "would be removed" if dry_run else "removed"
        typer.echo(
            f"{in_words(taken.sources, 'source')} {removed}: {taken_in_words(taken)}"
            + (f"; {in_words(taken.pinned, 'chunk')} pinned" if taken.pinned else "")
        )
    if missing:
        raise typer.Exit(1)


def _question(
    would: Taken, namespace: str | None, model: str | None, names: list[str] | None
) -> str:
    if names is None:
        named = [f"namespace {namespace}"] if namespace else []
        named += [f"model {model[:16]}"] if model else []
        what = f"everything in {' and '.join(named) or 'the store'}"
    else:
        what = in_words(would.sources, "source")
    pinned = f", {in_words(would.pinned, 'chunk')} of it pinned" if would.pinned else ""
    return f"Remove {what}, {taken_in_words(would)}{pinned}?"


def _confirm(question: str) -> None:
    if not typer.confirm(question, err=True):
        raise typer.Abort


def verify_command(
    store: options.Store,
    index_url: options.IndexUrl = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Drop what is broken, take in sound files that are not in the index, correct wrong rows,"
            " and remove what is of no use.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check every stored chunk against its checksums and the index.

    Exit code 1: something is wrong, and was not repaired.
    """
    with options.open_store(store, index_url, read_only=not repair) as kv_store:
        report = kv_store.verify(repair=repair)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        for problem in (*report.problems, *report.notices):
            typer.echo(f"{problem.kind:8}  {problem.path}: {problem.text}")
        found = in_words(len(report.problems), "problem")
        typer.echo(
            f"{in_words(report.chunks, 'chunk')}, {in_words(report.states, 'image state')}, "
            f"{size_in_words(report.bytes)}: {found}"
            + (", repaired" if report.repaired and report.problems else "")
        )
        if report.problems and not report.repaired:
            say("semkv verify --repair mends this; semkv precompute computes what is dropped")
        elif report.notices and not report.repaired:
            say("semkv verify --repair takes sound orphans into the index, and removes debris")
    if report.problems and not report.repaired:
        raise typer.Exit(1)
