"""`semkv explain`: why a prompt would be served out of the tiers, or not; without starting the model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from semkv_rag.cli import options
from semkv_rag.cli.adapters import lora_of
from semkv_rag.cli.output import check_writable, data_only_stdout, print_json, print_rich, say
from semkv_rag.cli.stored_of import stored_of
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.errors import OptionError
from semkv_rag.model_name import check_model
from semkv_rag.prompt_cache import Candidate, Cascade, PromptCacheOptions


def explain_command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The whole prompt; - reads it from stdin.")
    ],
    model: options.Model,
    store: options.Store,
    index_url: options.IndexUrl = None,
    namespace: options.Namespace = DEFAULT_NAMESPACE,
    chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a user's message, for the chat template.")
    ] = False,
    source_version: Annotated[
        str, typer.Option(help="The version of what the prompt was made from.")
    ] = "",
    prompt_cache: options.PromptCache = None,
    tier_encoder: options.TierEncoders = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="The least similarity of a donor, over that of --prompt-cache."),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(help="aligned, or substitute to see its vetoes; over that of --prompt-cache."),
    ] = None,
    html: options.Html = None,
    show_map: options.Map = False,
    lora: options.LoraAdapter = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Show what the store has of a prompt, and the stored prompts that come nearest to it in each tier.

    Nothing is computed by the model and nothing is stored. --html and --map show which of the prompt's
    tokens are stored; which of them are computed again is known once the model is asked (`semkv ask`).
    """
    check_writable("--html", html)
    cache_options, encoders = options.cache_options(prompt_cache or "{}", tier_encoder)
    assert cache_options is not None
    chosen = {"threshold": threshold, "reuse": reuse}
    cache_options = PromptCacheOptions.from_mapping(
        cache_options.to_mapping()
        | {name: value for name, value in chosen.items() if value is not None}
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise OptionError("the prompt is empty")
    arguments, adapter = options.engine_args(engine_arg), lora_of(lora)
    if adapter is not None:
        arguments = adapter.arguments(arguments)
    with data_only_stdout(), options.open_store(store, index_url, read_only=True) as kv_store:
        check_model(model, arguments.get("download_dir"))
        from semkv_rag.engine.offline import OfflineModel

        folder = None if adapter is None else adapter.path
        with OfflineModel(model, lora=folder, **arguments) as offline:
            text, tokens = offline.render([{"role": "user", "content": text}] if chat else text)
            report = stored_of(
                kv_store, offline.fingerprint, namespace, tokens.tolist(), offline.tokenizer
            )
        known = {one.fingerprint: one.description for one in kv_store.models()}
        with Cascade(kv_store, offline.fingerprint, cache_options, encoders) as cascade:
            cascade.load()
            found = cascade.explain(text, tokens, namespace, source_version=source_version)
    if offline.fingerprint not in known:
        names = sorted({description.get("model", "?") for description in known.values()})
        say(
            f"The store holds nothing of this model with these --engine-arg; it has {names}."
            if names
            else "The store is empty."
        )
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
    if not as_json:
        if show_map:
            print_rich(report)
        stored = report.exact_tokens + report.reused_tokens
        typer.echo(
            f"{len(tokens):,} tokens; of them stored {stored:,}, {report.exact_tokens:,} exact"
        )
        typer.echo(str(found))
        return
    print_json(
        {
            "prompt_tokens": len(tokens),
            "exact_tokens": report.exact_tokens,
            "reused_tokens": report.reused_tokens,
            "chunk_ids": list(report.chunk_ids),
            "served": None if found.served is None else _as_mapping(found.served),
            "candidates": [_as_mapping(candidate) for candidate in found.candidates],
            "reasons": dict(found.reasons),
        }
    )


def _as_mapping(candidate: Candidate) -> dict[str, Any]:
    donor = candidate.donor
    return {
        "tier": candidate.tier,
        "similarity": round(candidate.similarity, 4),
        "stopped": candidate.stopped,
        "donor": donor.id,
        "text": donor.text,
        "source_version": donor.source_version,
        "encoder": None if candidate.key is None else candidate.key.encoder,
    }
