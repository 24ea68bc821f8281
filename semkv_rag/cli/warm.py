"""`semkv warm`: prompts into the tiers, with a progress bar on stderr."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semkv_rag.cli import options
from semkv_rag.cli.adapters import lora_of
from semkv_rag.cli.output import (
    INTERRUPTED,
    data_only_stdout,
    in_words,
    print_json,
    say,
    size_in_words,
)
from semkv_rag.cli.progress_bar import ProgressBar
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus import Capturer, LazyCapturer
from semkv_rag.corpus.prompt_file import PromptLine, read_prompts
from semkv_rag.corpus.warm import WarmPrompt, WarmResult, warm
from semkv_rag.errors import OptionError
from semkv_rag.model_name import check_model
from semkv_rag.prompt_cache import Cascade
from semkv_rag.store import KVStore

if TYPE_CHECKING:
    from semkv_rag.engine.offline import OfflineModel


def warm_command(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, metavar="FILE", help="A JSON object in each line."
        ),
    ],
    model: options.Model,
    store: options.Store,
    index_url: options.IndexUrl = None,
    cache_dir: options.CacheDir = None,
    cache_bytes: options.CacheBytes = None,
    namespace: Annotated[
        str, typer.Option(help="The tenant of prompts that name none.")
    ] = DEFAULT_NAMESPACE,
    prompt_cache: options.PromptCache = None,
    tier_encoder: options.TierEncoders = None,
    lora: options.LoraAdapter = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Prefill prompts and store them, so that requests that resemble them find their KV.

    A line is {"prompt": "…"} or {"messages": […]}, with "namespace" and "source_version" where they
    matter. All lines are checked before anything is computed. What is stored already costs nothing,
    so the same command again goes on where it was stopped. Exit code 1: a prompt was not stored.
    """
    arguments = options.engine_args(engine_arg)
    cache_options, encoders = options.cache_options(prompt_cache or "{}", tier_encoder)
    lines = read_prompts(file, namespace)
    check_model(model, arguments.get("download_dir"))
    adapter = lora_of(lora)
    if adapter is not None:
        arguments = adapter.arguments(arguments)
    with data_only_stdout(), ExitStack() as stack:
        from semkv_rag.engine.offline import OfflineModel

        folder = None if adapter is None else adapter.path
        with OfflineModel(model, lora=folder, **arguments) as offline:
            prompts = [_rendered(offline, line) for line in lines]
        place = options.place(store, cache_dir, cache_bytes)
        kv_store = stack.enter_context(KVStore(place, index_url=index_url))
        cascade = stack.enter_context(
            Cascade(kv_store, offline.fingerprint, cache_options, encoders)
        )
        cascade.load()
        bar = stack.enter_context(ProgressBar("prompts"))

        def start() -> Capturer:
            from semkv_rag.engine import Engine

            bar.starting(model)
            engine = Engine(model, store=place, index_url=index_url, **arguments)
            stack.enter_context(engine)
            return engine if adapter is None else engine.with_adapter(adapter.request)

        capturer = LazyCapturer(kv_store, fingerprint=lambda: offline.fingerprint, start=start)
        try:
            result = warm(
                capturer,
                cascade,
                prompts,
                max_tokens=offline.max_model_len,
                on_progress=bar.update,
            )
        except KeyboardInterrupt:
            bar.stop()
            say("Stopped. What was stored is kept; the same command goes on from here.")
            raise typer.Exit(INTERRUPTED) from None
    for failure in result.failures:
        say(f"{failure.source}: {failure.reason}")
    if as_json:
        print_json(asdict(result))
    else:
        _print_summary(result)
    if result.failures:
        raise typer.Exit(1)


def _rendered(offline: OfflineModel, line: PromptLine) -> WarmPrompt:
    try:
        text, tokens = offline.render(line.prompt)
    except OptionError as error:
        raise OptionError(f"{line.name}: {error}") from error
    return WarmPrompt(line.name, text, tokens, line.namespace, line.source_version)


def _print_summary(result: WarmResult) -> None:
    typer.echo(
        f"{in_words(result.prompts, 'prompt')}: {result.stored:,} stored, "
        f"{result.present:,} there already, {len(result.failures):,} failed"
    )
    if result.computed:
        rate = result.tokens / result.computing_seconds
        typer.echo(
            f"{result.computed:,} computed: {result.tokens:,} tokens, "
            f"{size_in_words(result.bytes)} in {result.computing_seconds:.1f} s "
            f"({rate:,.0f} tokens/s)"
        )
