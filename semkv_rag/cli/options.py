"""Options that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from semkv_rag.config import DEFAULT_NAMESPACE, PRESETS, ReuseOptions
from semkv_rag.errors import OptionError, StoreError
from semkv_rag.prompt_cache import Encoder, PromptCacheOptions
from semkv_rag.prompt_cache.lookup import SEMANTIC_LAYER
from semkv_rag.prompt_cache.named import MINILM, prompt_cache_of
from semkv_rag.selectors import SELECTORS
from semkv_rag.store import KVStore, StorePlace, place_of
from semkv_rag.store.codecs import PLAIN, codec_names
from semkv_rag.store.place import is_url

Store: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--store",
        envvar="SEMKV_STORE",
        file_okay=False,
        help="The folder of the KV store, or its URL in an object store, such as s3://bucket/prefix.",
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
CacheDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        file_okay=False,
        help="With a store in an object store: the local folder in front of it, SEMKV_CACHE_DIR or one"
        " under ~/.cache/semkv unless given.",
    ),
]
CacheBytes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache-bytes",
        metavar="SIZE",
        help="What the files in that folder may take, such as 200GB; 20GB unless given.",
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
Preset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help=f"{', '.join(PRESETS)}: ratio and selector under one name, where they are not given;"
        " balanced unless given.",
    ),
]
Ratio: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ratio",
        help="Recomputed reused tokens / reused tokens, 0 to 1; auto: as many as the preset's promise"
        " takes.",
    ),
]
Selector: TypeAlias = Annotated[
    str | None, typer.Option("--selector", help=f"What picks them: {', '.join(SELECTORS)}.")
]
QuestionTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--question-tokens",
        help="How many tokens at the prompt's end are the question, for selectors that look at it;"
        " those behind the last chunk unless given.",
    ),
]
PromptCache: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--prompt-cache",
        metavar="JSON",
        help='Options of the prompt cache, such as {"threshold": 0.9}; {} for the defaults.',
    ),
]
TierEncoders: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--tier-encoder",
        metavar="LAYER=NAME",
        help=f"A layer's encoder: minilm, phash, or a folder or hub name of sentence-transformers, with"
        f" :image behind it for images; may be repeated. {SEMANTIC_LAYER}={MINILM} unless any is given.",
    ),
]
Codec: TypeAlias = Annotated[
    str,
    typer.Option(
        "--codec",
        help=f"How KV is stored: {', '.join(codec_names())}. All but {PLAIN} take less space, and lose a"
        " little.",
    ),
]
LoraAdapter: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="NAME=PATH",
        help="Use the model with this LoRA adapter, a folder that PEFT wrote. It has chunks of its own.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--html",
        dir_okay=False,
        metavar="FILE",
        help="Write a page with the prompt, coloured by what becomes of each token.",
    ),
]
Map: TypeAlias = Annotated[
    bool, typer.Option("--map", help="Print the prompt, coloured by what becomes of each token.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def reuse_options(
    preset: str | None,
    ratio: str | None,
    selector: str | None,
    question_tokens: int | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    enabled: bool = True,
    token_map: bool = False,
) -> ReuseOptions:
    """The options that a command was given; `balanced` where it was given none.

    Raises:
        OptionError: one of them cannot be used.
    """
    given = {
        "preset": preset,
        "ratio": _ratio(ratio),
        "selector": selector,
        "question_tokens": question_tokens,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    base = ReuseOptions(enabled=enabled, namespace=namespace, token_map=token_map)
    return ReuseOptions.from_mapping(chosen, base)


def _ratio(value: str | None) -> float | str | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return value  # `auto`, or what the options refuse


def place(
    store: Path,
    cache_dir: Path | None = None,
    cache_bytes: str | None = None,
    fetch_timeout_ms: float | None = None,
) -> StorePlace:
    """Where a store is that a command was given.

    Raises:
        OptionError: an option cannot be used.
    """
    return place_of(
        store,
        cache_dir=cache_dir,
        cache_bytes=None if cache_bytes is None else size_in_bytes(cache_bytes),
        fetch_timeout_ms=fetch_timeout_ms,
    )


def open_store(root: Path, index_url: str | None, *, read_only: bool = False) -> KVStore:
    """The store at `root`, which must be there: a mistyped folder is not to become a store.

    Raises:
        StoreError: it is not there, or cannot be opened.
    """
    if not is_url(root) and not root.is_dir():
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


def size_in_bytes(text: str) -> int:
    """A number of bytes as people write it: `20GB`, `1.5 TB`, `800000000`; powers of 1000.

    Raises:
        OptionError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B?\s*", text, re.IGNORECASE)
    if found is None:
        raise OptionError(f"{text!r} is no size: write it as 20GB or in bytes")
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * 1000**power)


def cache_options(
    text: str | None, encoders: Sequence[str] | None
) -> tuple[PromptCacheOptions | None, dict[str, Encoder] | None]:
    """The prompt cache's options, None without any, and the encoders that are named, None without any.

    Args:
        text: a JSON object of the fields of `PromptCacheOptions`.
        encoders: `LAYER=NAME` each.

    Raises:
        OptionError: one of them cannot be used.
    """
    layers: dict[str, str] = {}
    for given in encoders or ():
        layer, equals, name = given.partition("=")
        if not equals or layer in layers:
            raise OptionError(f"--tier-encoder {given}: write LAYER=NAME, once for each layer")
        layers[layer] = name
    try:
        values = None if text is None else json.loads(text)
    except ValueError as error:
        raise OptionError(f"--prompt-cache {text}: {error}; write a JSON object") from error
    if text is not None and not isinstance(values, dict):
        raise OptionError(f"--prompt-cache {text}: write a JSON object")
    return prompt_cache_of(values, layers)
