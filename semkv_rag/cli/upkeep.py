"""`semkv rm` and `semkv verify`: taking away from a store, and checking what is in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Annotated

import typer

from semkv_rag.cli import options
from semkv_rag.cli.output import in_words, print_json, say, size_in_words
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.store import KVStore


def rm_command(
    store: options.Store,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Sources by name, as semkv ls lists them."),
    ] = None,
    index_url: options.IndexUrl = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"The sources' namespace ({DEFAULT_NAMESPACE} unless given); "
            "without sources: remove all that is in it."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all that is in the store.")
    ] = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> None:
    """Remove documents and the chunks that no other document holds.

    Exit code 1: a source is not in the store, or the question was not answered with yes.
    """
    if everything and (sources or namespace):
        raise typer.BadParameter("--all goes alone", param_hint="--all")
    if not (everything or sources or namespace):
        raise typer.BadParameter("name sources, a --namespace, or --all", param_hint="SOURCE")
    with options.open_store(store, index_url) as kv_store:
        if sources:
            _remove_sources(kv_store, sources, namespace or DEFAULT_NAMESPACE, yes, as_json)
        else:
            _remove_all(kv_store, namespace, yes, as_json)


def _remove_sources(
    store: KVStore, names: list[str], namespace: str, yes: bool, as_json: bool
) -> None:
    found = [source for source in store.sources(namespace=namespace) if source.name in names]
    missing = sorted(set(names) - {source.name for source in found})
    for name in missing:
        say(f"{name} is not in namespace {namespace}")
    if found:
        _confirm(f"Remove {in_words(len(found), 'source')}?", yes)
    before = _bytes(store, namespace)
    for source in found:
        store.remove_source(source.model, source.namespace, source.name)
    _report(len(found), before - _bytes(store, namespace), as_json)
    if missing:
        raise typer.Exit(1)


def _remove_all(store: KVStore, namespace: str | None, yes: bool, as_json: bool) -> None:
    where = "the store" if namespace is None else f"namespace {namespace}"
    before = _bytes(store, namespace)
    _confirm(f"Remove everything in {where}, {size_in_words(before)}?", yes)
    sources = store.sources(namespace=namespace)
    for source in sources:
        store.remove_source(source.model, source.namespace, source.name)
    # What no source holds: whole prompts, and chunks of a run that was killed.
    ids = defaultdict(list)
    for chunk in store.chunks(namespace=namespace):
        ids[chunk.model, chunk.namespace].append(chunk.id)
    for (model, name), rest in ids.items():
        store.remove(model, name, rest)
    store.states.remove([state.id for state in store.states.records(namespace=namespace)])
    _report(len(sources), before - _bytes(store, namespace), as_json)


def _bytes(store: KVStore, namespace: str | None) -> int:
    return sum(one.bytes for one in store.stats(namespace))


def _confirm(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        raise typer.Abort


def _report(sources: int, freed_bytes: int, as_json: bool) -> None:
    if as_json:
        print_json({"sources": sources, "bytes": freed_bytes})
    else:
        typer.echo(f"{in_words(sources, 'source')} removed, {size_in_words(freed_bytes)} freed")


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
