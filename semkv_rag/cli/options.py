"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from semkv_rag.errors import OptionError, StoreError
from semkv_rag.store import KVStore

Store: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--store", envvar="SEMKV_STORE", file_okay=False, help="The folder of the KV store."
    ),
]
IndexUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--index-url",
        envvar="SEMKV_INDEX_URL",
        help="The store's index as an SQLAlchemy URL; a SQLite file in the store unless given.",
    ),
]
Model: TypeAlias = Annotated[
    str,
    typer.Option("--model", envvar="SEMKV_MODEL", help="A model's folder or name, as for vLLM."),
]
Namespace: TypeAlias = Annotated[
    str, typer.Option("--namespace", help="The tenant whose chunks these are.")
]
AnyNamespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", help="Only this namespace; all unless given.")
]
EngineArgs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="NAME=VALUE",
        help="One of vLLM's engine arguments, such as dtype=float32; may be repeated.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def open_store(root: Path, index_url: str | None, *, read_only: bool = False) -> KVStore:
    """The store at `root`, which must be there: a mistyped folder is not to become a store.

    Raises:
        StoreError: it is not there, or cannot be opened.
    """
    if not root.is_dir():
        raise StoreError(f"there is no store at {root}: semkv precompute makes one")
    return KVStore(root, index_url=index_url, read_only=read_only)


def engine_args(values: Sequence[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` texts as keyword arguments; a value is JSON where it reads as JSON.

    Raises:
        OptionError: a text has no `=`.
    """
    arguments: dict[str, Any] = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--engine-arg {text}: write NAME=VALUE")
        try:
            arguments[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            arguments[name.replace("-", "_")] = value
    return arguments
