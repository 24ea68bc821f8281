"""`semkv ls` and `semkv info`: what a store holds."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer
from sqlalchemy import make_url

from semkv_rag.cli import options
from semkv_rag.cli.lifecycle import limit_in_words, pin_in_words
from semkv_rag.cli.output import in_words, print_json, print_table, size_in_words
from semkv_rag.store import KVStore, SourceInfo


def ls_command(
    store: options.Store,
    index_url: options.IndexUrl = None,
    namespace: options.AnyNamespace = None,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="List the sources' chunks, one by one.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the stored documents, or their chunks."""
    with options.open_store(store, index_url, read_only=True) as kv_store:
        sources = kv_store.sources(namespace=namespace)
        if chunks:
            _list_chunks(kv_store, sources, as_json)
        else:
            _list_sources(sources, as_json)


def _list_sources(sources: list[SourceInfo], as_json: bool) -> None:
    if as_json:
        print_json([asdict(source) for source in sources])
        return
    print_table(
        ("source", "namespace", "model", "chunks", "updated", "pinned"),
        [
            (
                s.name,
                s.namespace,
                s.model[:16],
                len(s.chunk_ids),
                _date(s.updated_at),
                _pinned(s.pinned),
            )
            for s in sources
        ],
    )


def _list_chunks(store: KVStore, sources: list[SourceInfo], as_json: bool) -> None:
    found = [
        (source, record)
        for source in sources
        for record in store.get(source.model, source.namespace, source.chunk_ids).values()
    ]
    held = store.lifecycle.pinned(record.id for _, record in found)
    if as_json:
        print_json(
            [
                {"source": source.name, **asdict(record), "pinned": record.id in held}
                for source, record in found
            ]
        )
        return
    print_table(
        ("chunk", "source", "kind", "codec", "tokens", "behind", "bytes", "used", "pinned"),
        [
            (
                r.id[:16],
                source.name,
                r.kind,
                r.codec,
                r.token_count,
                r.context_count,
                r.bytes,
                _date(r.used_at),
                _pinned(r.id in held),
            )
            for source, r in found
        ],
    )


def info_command(
    store: options.Store,
    index_url: options.IndexUrl = None,
    namespace: options.AnyNamespace = None,
    as_json: options.Json = False,
) -> None:
    """Show a store's models, namespaces, counts and sizes, its limits and pins."""
    with options.open_store(store, index_url, read_only=True) as kv_store:
        stats = kv_store.stats(namespace)
        models = {model.fingerprint: dict(model.description) for model in kv_store.models()}
        limits = [
            one
            for one in kv_store.lifecycle.limits()
            if namespace is None or one.namespace in (None, namespace)
        ]
        pins = [
            pin
            for pin in kv_store.lifecycle.pins()
            if namespace is None or pin.namespace in (None, namespace)
        ]
        url = make_url(kv_store.index_url).render_as_string(hide_password=True)
        place = kv_store.place
    where = place if place.objects else store
    folder = next(one for one in (place.root, *place.root.parents) if one.is_dir())
    free = shutil.disk_usage(folder).free
    if as_json:
        print_json(
            {
                "root": str(where),
                "index_url": url,
                "free_bytes": free,
                "models": models,
                "namespaces": [asdict(one) for one in stats],
                "limits": [asdict(one) for one in limits],
                "pins": [asdict(pin) for pin in pins],
            }
        )
        return
    typer.echo(f"{where}, index {url}, {size_in_words(free)} free")
    for limit in limits:
        typer.echo(f"limit of {limit_in_words(limit)}")
    for pin in pins:
        typer.echo(f"pinned: {pin_in_words(pin)}")
    for fingerprint, description in models.items():
        typer.echo(f"\nmodel {fingerprint[:16]}")
        for name, value in description.items():
            typer.echo(f"  {name}: {value}")
        for one in stats:
            if one.model == fingerprint:
                typer.echo(
                    f"  namespace {one.namespace}: {in_words(one.sources, 'source')}, "
                    f"{in_words(one.chunks, 'chunk')}, {in_words(one.tokens, 'token')}, "
                    f"{in_words(one.states, 'image state')}, {size_in_words(one.bytes)}"
                )


def _pinned(yes: bool) -> str:
    return "pinned" if yes else ""


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
