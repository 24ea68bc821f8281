"""`semkv limit`, `pin`, `unpin` and `gc`: how long what is stored stays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from semkv_rag.cli import options
from semkv_rag.cli.output import in_words, print_json, print_table, say, size_in_words
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.errors import OptionError
from semkv_rag.store import Collected, KVStore, Limit, Pin, Taken

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SHORTEST = 8
"""Digits of a fingerprint that are enough to name a model."""

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE",
        help="Sources by name, as semkv ls lists them, or by pattern: 'manuals/*'.",
    ),
]
StoredModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A stored model: its fingerprint or the first 8 digits or more of it, or its name, as semkv"
        " info shows them.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]


def limit_command(
    store: options.Store,
    index_url: options.IndexUrl = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", help="The namespace whose limit it is; the store's unless given."
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", help="What it may take, such as 200GB; none: no limit."
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long a chunk stays that is not used, such as 12h, 30d or 8w; none: no limit.",
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Set what a store or a namespace may hold, and for how long; without a value, show the limits.

    Every process that adds keeps them. What is over them when they are set goes with the next that
    adds, or with semkv gc.
    """
    if max_bytes is None and ttl is None:
        if dry_run:
            raise typer.BadParameter("use it with --max-bytes or --ttl", param_hint="--dry-run")
        with options.open_store(store, index_url, read_only=True) as kv_store:
            _show_limits(kv_store, namespace, as_json)
        return
    with options.open_store(store, index_url, read_only=dry_run) as kv_store:
        wanted = kv_store.lifecycle.limit(namespace)
        if max_bytes is not None:
            size = None if max_bytes == "none" else options.size_in_bytes(max_bytes)
            wanted = replace(wanted, max_bytes=size)
        if ttl is not None:
            wanted = replace(wanted, ttl_s=None if ttl == "none" else seconds(ttl))
        if not dry_run:
            kv_store.lifecycle.set_limit(wanted)
        would = kv_store.lifecycle.would_collect(wanted)
    if as_json:
        print_json({"dry_run": dry_run, "limit": asdict(wanted), "over_now": asdict(would)})
        return
    typer.echo(limit_in_words(wanted))
    if would != Collected(Taken(), Taken(), Taken()):
        _print_collected(would, "goes with the next that adds, or with semkv gc")


def _show_limits(store: KVStore, namespace: str | None, as_json: bool) -> None:
    limits = [one for one in store.lifecycle.limits() if namespace in (None, one.namespace)]
    used = {
        one.namespace: sum(entry.bytes for entry in store.stats(one.namespace)) for one in limits
    }
    if as_json:
        print_json([{**asdict(one), "bytes": used[one.namespace]} for one in limits])
        return
    for one in limits:
        typer.echo(f"{limit_in_words(one)}; {size_in_words(used[one.namespace])} now")
    if not limits:
        typer.echo("no limits")


def limit_in_words(limit: Limit) -> str:
    where = "the store" if limit.namespace is None else f"namespace {limit.namespace}"
    size = "any size" if limit.max_bytes is None else f"at most {size_in_words(limit.max_bytes)}"
    kept = "" if limit.ttl_s is None else f", {_time_in_words(limit.ttl_s)} after the last use"
    return f"{where}: {size}{kept}"


def pin_command(
    store: options.Store,
    sources: Sources = None,
    index_url: options.IndexUrl = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"The sources' namespace ({DEFAULT_NAMESPACE} unless given); without sources: all that"
            " is in it, now and later."
        ),
    ] = None,
    model: StoredModel = None,
    dry_run: DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Keep documents, a namespace or a model: they are not evicted and do not expire.

    A pinned document stays pinned when it changes. semkv rm and semkv gc --model remove what is pinned,
    too. Exit code 1: a source is not in the store.
    """
    with options.open_store(store, index_url, read_only=dry_run) as kv_store:
        pins, missing = _pins(kv_store, sources, namespace, model)
        named = kv_store.lifecycle.named(pins)
        if not dry_run:
            for pin in pins:
                kv_store.lifecycle.pin(pin)
    _report_pins("pinned", named, dry_run, as_json)
    if missing:
        raise typer.Exit(1)


def unpin_command(
    store: options.Store,
    sources: Sources = None,
    index_url: options.IndexUrl = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"The sources' namespace ({DEFAULT_NAMESPACE} unless given); without sources: its pin."
        ),
    ] = None,
    model: StoredModel = None,
    dry_run: DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Take pins away, named as they were set.

    Exit code 1: one of them is not set.
    """
    with options.open_store(store, index_url, read_only=dry_run) as kv_store:
        pins, missing = _pins(kv_store, sources, namespace, model)
        there = set(kv_store.lifecycle.pins())
        unset = [pin for pin in pins if pin not in there]
        if any("*" in name or "?" in name or "[" in name for name in sources or ()):
            unset = [] if set(pins) & there else unset  # a pattern is about those that are pinned
        named = kv_store.lifecycle.named([pin for pin in pins if pin in there])
        for pin in () if dry_run else pins:
            kv_store.lifecycle.unpin(pin)
    for pin in unset:
        say(f"{pin_in_words(pin)} is not pinned by itself: semkv info shows the pins")
    _report_pins("unpinned", named, dry_run, as_json)
    if missing or unset:
        raise typer.Exit(1)


def _pins(
    store: KVStore, names: Sequence[str] | None, namespace: str | None, model: str | None
) -> tuple[list[Pin], list[str]]:
    """The pins that a command names, and the sources among them that are not there, which are said."""
    if not (names or namespace or model):
        raise typer.BadParameter("name sources, a --namespace or a --model", param_hint="SOURCE")
    fingerprint = None if model is None else stored_model(store, model)
    if not names:
        return [Pin(fingerprint, namespace)], []
    where = namespace or DEFAULT_NAMESPACE
    found, missing = select_sources(store, names, where, fingerprint)
    return [Pin(fingerprint, where, name) for name in found], missing


def _report_pins(verb: str, named: Taken, dry_run: bool, as_json: bool) -> None:
    if as_json:
        there = asdict(named)
        del there["pinned"]
        print_json({"dry_run": dry_run, **there})
        return
    would = "would be " if dry_run else ""
    typer.echo(f"{in_words(named.sources, 'source')} {would}{verb}: {taken_in_words(named)}")


def pin_in_words(pin: Pin) -> str:
    if pin.source is not None:
        return f"{pin.source} in namespace {pin.namespace}"
    named = [f"model {pin.model[:16]}"] if pin.model else []
    return ", ".join([*named, f"namespace {pin.namespace}"] if pin.namespace else named)


def gc_command(
    store: options.Store,
    index_url: options.IndexUrl = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Remove all of this model: its fingerprint or the first 8 digits or more of it, or its"
            " name, as semkv info shows them; may be repeated.",
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Remove what expired, what is over the limits, and models that are no longer used.

    Runs beside engines and other commands. What is pinned stays, but for that of a named model.
    """
    with options.open_store(store, index_url, read_only=dry_run) as kv_store:
        fingerprints = [stored_model(kv_store, name) for name in model or ()]
        collected = kv_store.lifecycle.collect(fingerprints, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, **asdict(collected)})
    else:
        _print_collected(collected, "would go" if dry_run else "removed")


def _print_collected(collected: Collected, verb: str) -> None:
    parts = {
        "of the models": collected.models,
        "unused for too long": collected.expired,
        "over a limit": collected.over,
    }
    rows = [
        (name, part.sources, part.chunks, part.states, size_in_words(part.bytes))
        for name, part in parts.items()
        if part != Taken()
    ]
    if rows:
        print_table((verb, "sources", "chunks", "image states", "bytes"), rows)
        if held := collected.models.pinned:
            say(f"{in_words(held, 'chunk')} of the models had been pinned")
    else:
        typer.echo("nothing to remove")


# ---- shared with `semkv rm` --------------------------------------------------------------------


def stored_model(store: KVStore, name: str) -> str:
    """The fingerprint of a stored model that is named by it, by its first digits, or by its name.

    Raises:
        OptionError: there is none, or several.
    """
    models = store.models()
    found = [one.fingerprint for one in models if one.fingerprint == name] or [
        one.fingerprint
        for one in models
        if one.description.get("model") == name
        or (len(name) >= _SHORTEST and one.fingerprint.startswith(name))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(fingerprint[:16] for fingerprint in found)
        raise OptionError(f"--model {name} is {several}: name it by its fingerprint")
    raise OptionError(f"--model {name} is not in the store: semkv info shows its models")


def select_sources(
    store: KVStore, names: Sequence[str], namespace: str, model: str | None = None
) -> tuple[list[str], list[str]]:
    """The stored sources that are named, by pattern or whole, and the names that none has, which are
    said."""
    there = {source.name for source in store.sources(model, namespace)}
    found: set[str] = set()
    missing = []
    for name in names:
        matching = {name} & there or {one for one in there if fnmatchcase(one, name)}
        found |= matching
        if not matching:
            missing.append(name)
            say(f"{name} is not in namespace {namespace}")
    return sorted(found), missing


def taken_in_words(taken: Taken) -> str:
    """`3 chunks, 1 image state, 4.1 MB`."""
    states = f"{in_words(taken.states, 'image state')}, " if taken.states else ""
    return f"{in_words(taken.chunks, 'chunk')}, {states}{size_in_words(taken.bytes)}"


def seconds(text: str) -> float:
    """A time as people write it: `90s`, `12h`, `30d`, `8w`.

    Raises:
        OptionError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if found is None or not float(found[1]):
        raise OptionError(f"{text!r} is no time: write it as 12h, 30d or 8w")
    return float(found[1]) * _SECONDS[found[2]]


def _time_in_words(time_s: float) -> str:
    for unit, length in reversed(_SECONDS.items()):
        if time_s % length == 0:
            return f"{time_s / length:,.0f}{unit}"
    return f"{time_s:,.1f}s"
