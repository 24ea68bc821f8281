"""`semkv serve`: vLLM's own OpenAI server, with reuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from semkv_rag.cli import options
from semkv_rag.config import DEFAULT_NAMESPACE, check_namespace
from semkv_rag.errors import OptionError
from semkv_rag.model_name import check_model
from semkv_rag.store.codecs import PLAIN, codec_named


def serve_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder or name, as for vLLM.")
    ],
    store: options.Store,
    index_url: options.IndexUrl = None,
    cache_dir: options.CacheDir = None,
    cache_bytes: options.CacheBytes = None,
    fetch_timeout_ms: Annotated[
        float | None,
        typer.Option(
            help="With a store in an object store: how long a request waits for files that do not come;"
            " 200 unless given. Then it is computed.",
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The namespace of requests whose API key has none of its own.")
    ] = DEFAULT_NAMESPACE,
    api_key_namespaces: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="A JSON object of tenants' API keys and the namespace of each.",
        ),
    ] = None,
    operator_key: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="A file with the API key for what concerns all tenants, such as /metrics.",
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What one client may take, as a JSON object."),
    ] = None,
    trust_request_namespace: Annotated[
        bool,
        typer.Option("--trust-request-namespace", help="Let a request name its namespace itself."),
    ] = False,
    preset: options.Preset = None,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    question_tokens: options.QuestionTokens = None,
    prompt_cache: options.PromptCache = None,
    tier_encoder: options.TierEncoders = None,
    ram_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="What stored chunks may take in memory, such as 20GB, where the next request finds them"
            " read and verified; taken from the system at once.",
        ),
    ] = "0",
    codec: options.Codec = PLAIN,
    console: Annotated[
        bool,
        typer.Option(
            "--console",
            help="Show what reuse does, on a page at /semkv/v1/console: to each key its own.",
        ),
    ] = False,
    console_changes: Annotated[
        bool,
        typer.Option("--console-changes", help="Let documents be pinned and deleted there, too."),
    ] = False,
) -> None:
    """Serve a model with vLLM's OpenAI server, with reuse.

    The model stands first. Every option not listed here goes to vLLM as it is: --port, --dtype,
    --max-model-len and all others. A request may choose preset, ratio and selector, or switch reuse off.
    """
    cache_options, encoders = options.cache_options(prompt_cache, tier_encoder)
    check_model(model, _of_vllm("--download-dir", context.args))
    from semkv_rag.server.limits import Limits
    from semkv_rag.server.serve import serve

    code = serve(
        model,
        store=options.place(store, cache_dir, cache_bytes, fetch_timeout_ms),
        index_url=index_url,
        reuse=options.reuse_options(preset, ratio, selector, question_tokens, namespace=namespace),
        namespace=namespace,
        api_key_namespaces=_read_api_keys(api_key_namespaces) if api_key_namespaces else None,
        trust_request_namespace=trust_request_namespace,
        operator_key=_read_key(operator_key) if operator_key else None,
        limits=Limits.from_mapping(_json_object("--limits", limits)),
        prompt_cache=cache_options,
        encoders=encoders,
        ram_bytes=options.size_in_bytes(ram_bytes),
        codec=codec_named(codec).name,
        console=console,
        console_changes=console_changes,
        vllm_args=context.args,
    )
    raise typer.Exit(code)


def _of_vllm(option: str, arguments: Sequence[str]) -> str | None:
    """The value of one of vLLM's options, if it is given."""
    for place, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        if name == option:
            return value if equals else "".join(arguments[place + 1 : place + 2])
    return None


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is not read: {error}") from error


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        values = {} if text is None else json.loads(text)
    except ValueError as error:
        raise OptionError(f"{option} {text}: {error}; write a JSON object") from error
    if not isinstance(values, dict):
        raise OptionError(f"{option} {text}: write a JSON object")
    return values


def _read_api_keys(path: Path) -> dict[str, str]:
    """The file's API keys and namespaces.

    Raises:
        OptionError: it is not a JSON object of strings that can be namespaces.
    """
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is not read: {error}") from error
    if not isinstance(keys, dict) or not keys:
        raise OptionError(f'{path} is not read: write {{"API key": "namespace", …}}')
    return {key: check_namespace(name) for key, name in keys.items()}
