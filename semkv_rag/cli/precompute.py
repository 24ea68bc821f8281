"""`semkv precompute`: documents into the store, with a progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

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
from semkv_rag.corpus import (
    CONTEXT_MODES,
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_CONTEXT,
    Capturer,
    LazyCapturer,
    PrecomputeResult,
    precompute,
)
from semkv_rag.corpus.capture import CAPTURING_ARGS
from semkv_rag.corpus.chat_prefix import chat_prefix
from semkv_rag.corpus.context import context_modes
from semkv_rag.errors import OptionError
from semkv_rag.known_fingerprints import KnownFingerprint
from semkv_rag.model_name import check_model
from semkv_rag.on_ray import EngineResources, precompute_on_ray
from semkv_rag.store import KVStore
from semkv_rag.store.codecs import PLAIN, codec_named
from semkv_rag.store.place import is_url

if TYPE_CHECKING:
    from semkv_rag.corpus import CaptureItem, CaptureResult
    from semkv_rag.engine.offline import OfflineModel


def precompute_command(
    paths: Annotated[
        list[Path],
        typer.Argument(exists=True, metavar="PATH", help="Documents, and folders of documents."),
    ],
    model: options.Model,
    store: options.Store,
    index_url: options.IndexUrl = None,
    cache_dir: options.CacheDir = None,
    cache_bytes: options.CacheBytes = None,
    namespace: options.Namespace = DEFAULT_NAMESPACE,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of a chunk.")
    ] = DEFAULT_CHUNK_TOKENS,
    overlap: Annotated[
        int, typer.Option(min=0, help="The most tokens a chunk shares with the one before it.")
    ] = 0,
    prefix: Annotated[str, typer.Option(help="The text every prompt will start with.")] = "",
    prefix_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The same, out of a file."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts go through the model's chat template, and --prefix is what the user's "
            "message begins with.",
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message, with --chat.")] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What stands to a chunk's left while it is computed: {', '.join(CONTEXT_MODES)};"
            " may be repeated, a variant of each chunk for each."
            f" {' and '.join(DEFAULT_CONTEXT)} unless given."
        ),
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Remove the folders' sources whose files are gone.")
    ] = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help="Leave out documents whose KV would make the store larger, such as 20GB.",
        ),
    ] = None,
    codec: options.Codec = PLAIN,
    lora: options.LoraAdapter = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say how many tokens would be computed, and their bytes."
        ),
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Spread the documents over engines on a Ray cluster, or on one started here.",
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The cluster, with --ray; that of RAY_ADDRESS, or a new one here, unless given."
        ),
    ] = None,
    ray_engines: Annotated[
        int | None,
        typer.Option(min=1, help="How many engines, with --ray; as many as fit unless given."),
    ] = None,
    ray_cpus: Annotated[
        float, typer.Option(min=0, help="The CPUs of each; may be a fraction.")
    ] = 1.0,
    ray_gpus: Annotated[
        float | None,
        typer.Option(
            min=0, help="The GPUs of each; may be a fraction. One if there are any, unless given."
        ),
    ] = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Run documents through the model once and store their KV.

    Reads text, Markdown, HTML and PDF. What is stored already costs nothing, so the same command
    again goes on where it was stopped. Exit code 1: a document could not be stored.
    """
    if prefix and prefix_file:
        raise typer.BadParameter("use --prefix or --prefix-file", param_hint="--prefix")
    if system is not None and not chat:
        raise typer.BadParameter("use it with --chat", param_hint="--system")
    prompt_prefix = _text(prefix_file) if prefix_file else prefix
    if ray and max_bytes is not None:
        raise typer.BadParameter(
            "use it without --ray: no engine sees what others store", param_hint="--max-bytes"
        )
    if not ray and (ray_address, ray_engines, ray_cpus, ray_gpus) != (None, None, 1.0, None):
        raise typer.BadParameter("use --ray-… with --ray", param_hint="--ray")
    modes = context_modes(context or DEFAULT_CONTEXT)
    most = None if max_bytes is None else options.size_in_bytes(max_bytes)
    arguments = options.engine_args(engine_arg)
    codec_named(codec)
    check_model(model, arguments.get("download_dir"))
    if (adapter := lora_of(lora)) is not None:
        arguments = adapter.arguments(arguments)
    if chat:
        prompt_prefix = _chat_prefix(model, arguments, prompt_prefix, system)
    with data_only_stdout(), ExitStack() as stack:
        if dry_run and not (is_url(store) or store.is_dir()):  # it is not made for that
            store = Path(stack.enter_context(TemporaryDirectory()))
        place = options.place(store, cache_dir, cache_bytes)
        kv_store = stack.enter_context(KVStore(place, index_url=index_url))
        bar = stack.enter_context(ProgressBar())

        known = KnownFingerprint(model, arguments)

        def fingerprint() -> str:
            if adapter is not None:
                return adapter.fingerprint(model, arguments)
            if (remembered := known.get()) is not None:
                return remembered
            from semkv_rag.engine import model_fingerprint

            worked_out = model_fingerprint(model, **arguments)
            known.remember(worked_out)
            return worked_out

        def start() -> Capturer:
            if dry_run:
                from semkv_rag.engine.offline import OfflineModel

                folder = None if adapter is None else adapter.path
                offline = OfflineModel(model, codec=codec, lora=folder, **arguments)
                return _Counted(stack.enter_context(offline), kv_store)
            from semkv_rag.engine import Engine

            bar.starting(model)
            of_engine = {**CAPTURING_ARGS, **arguments}
            engine = Engine(model, store=place, index_url=index_url, codec=codec, **of_engine)
            stack.enter_context(engine)
            if adapter is not None:
                return engine.with_adapter(adapter.request)
            known.remember(engine.fingerprint)
            return engine

        what: dict[str, Any] = {
            "namespace": namespace,
            "chunk_tokens": chunk_tokens,
            "overlap": overlap,
            "prefix": prompt_prefix,
            "context": modes,
            "sync": sync,
        }
        try:
            if ray and not dry_run:
                bar.stop()  # Ray shows one
                result = precompute_on_ray(
                    model,
                    paths,
                    store=place,
                    index_url=index_url,
                    codec=codec,
                    address=ray_address,
                    resources=EngineResources(ray_engines, ray_cpus, ray_gpus),
                    lora=None if adapter is None else (adapter.name, adapter.path),
                    **what,
                    **arguments,
                )
            else:
                result = precompute(
                    LazyCapturer(kv_store, fingerprint=fingerprint, start=start),
                    paths,
                    max_bytes=most,
                    dry_run=dry_run,
                    on_progress=bar.update,
                    **what,
                )
        except KeyboardInterrupt:
            bar.stop()
            say("Stopped. What was computed is kept; the same command goes on from here.")
            raise typer.Exit(INTERRUPTED) from None
    for failure in result.failures:
        say(f"{failure.source}: {failure.reason}")
    for name in result.empty:
        say(f"{name}: holds no text")
    if result.skipped:
        say(
            f"{in_words(len(result.skipped), 'file')} left out: other kinds, links that lead elsewhere"
        )
    if as_json:
        print_json(asdict(result))
    else:
        _print_summary(result)
    if result.failures:
        raise typer.Exit(1)


class _Counted:
    """A model that computes nothing, for a dry run."""

    def __init__(self, model: OfflineModel, store: KVStore) -> None:
        self.fingerprint = model.fingerprint
        self.tokenizer = model.tokenizer
        self.max_model_len = model.max_model_len
        self.kv_bytes_per_token = model.kv_bytes_per_token
        self.store = store

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 64
    ) -> Iterator[CaptureResult]:
        raise AssertionError("a dry run computes nothing")


def _print_summary(result: PrecomputeResult) -> None:
    if (work := result.to_compute) is not None:
        typer.echo(
            f"{in_words(result.documents, 'document')}: {work.documents:,} new or changed, "
            f"{result.unchanged:,} unchanged, {len(result.failures):,} failed"
        )
        typer.echo(
            f"{in_words(work.chunks, 'chunk')} to compute: {work.tokens:,} tokens, about "
            f"{size_in_words(work.bytes)}"
        )
        return
    typer.echo(
        f"{in_words(result.documents, 'document')}: {result.changed:,} new or changed, "
        f"{result.unchanged:,} unchanged, {result.removed:,} removed, "
        f"{len(result.failures):,} failed"
    )
    if result.chunks_captured:
        rate = result.tokens / result.computing_seconds
        typer.echo(
            f"{in_words(result.chunks_captured, 'chunk')} computed, {result.chunks_reused:,} "
            f"found in the store: {result.tokens:,} tokens, {size_in_words(result.bytes)} "
            f"in {result.computing_seconds:.1f} s ({rate:,.0f} tokens/s)"
        )


def _text(path: Path) -> str:
    """The text of a file.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"--prefix-file {path} is not read: {error}") from error


def _chat_prefix(model: str, arguments: dict[str, Any], user: str, system: str | None) -> str:
    """The prompt prefix by the chat template of a model, of which only the tokenizer is loaded.

    Raises:
        OptionError: it has no tokenizer with a chat template.
    """
    from transformers import AutoTokenizer

    name = arguments.get("tokenizer") or model
    revision = arguments.get("tokenizer_revision") or arguments.get("revision")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, cache_dir=arguments.get("download_dir")
        )
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--chat: the tokenizer of {name} is not read: {error}; give --prefix as a text"
        ) from error
    return chat_prefix(tokenizer, user, system)
