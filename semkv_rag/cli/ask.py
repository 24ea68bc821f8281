"""`semkv ask`: one question to the model, with what the store holds of its prompt reused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semkv_rag.cli import options
from semkv_rag.cli.adapters import lora_of
from semkv_rag.cli.output import check_writable, data_only_stdout, print_json, print_rich, say
from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus import read_document
from semkv_rag.model_name import check_model


def ask_command(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The end of the prompt.")],
    model: options.Model,
    store: options.Store,
    index_url: options.IndexUrl = None,
    cache_dir: options.CacheDir = None,
    cache_bytes: options.CacheBytes = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A document to put before the question; may be repeated.",
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="The text the prompt starts with.")] = "",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Send the prompt as a user's message, through the model's chat template.",
            show_default="where there is one",
        ),
    ] = None,
    namespace: options.Namespace = DEFAULT_NAMESPACE,
    preset: options.Preset = None,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    question_tokens: options.QuestionTokens = None,
    off: Annotated[bool, typer.Option("--off", help="Reuse nothing, as plain vLLM.")] = False,
    lora: options.LoraAdapter = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the answer.")] = 256,
    html: options.Html = None,
    show_map: options.Map = False,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Answer a question behind documents, out of their stored KV.

    The prompt is the prefix, the documents and the question, with an empty line between. Models with a
    chat template are sent it as a user's message. With --json the reuse report is printed too.
    """
    check_writable("--html", html)
    reuse = options.reuse_options(
        preset,
        ratio,
        selector,
        question_tokens,
        namespace=namespace,
        enabled=not off,
        token_map=html is not None or show_map,
    )
    parts = [prefix, *(read_document(path) for path in context or ()), question]
    text = "\n\n".join(part for part in parts if part)
    arguments = options.engine_args(engine_arg)
    check_model(model, arguments.get("download_dir"))
    if (adapter := lora_of(lora)) is not None:
        arguments = adapter.arguments(arguments)
    with data_only_stdout():
        from semkv_rag.engine import Engine

        place = options.place(store, cache_dir, cache_bytes)
        with Engine(model, store=place, index_url=index_url, reuse=reuse, **arguments) as engine:
            through_template = engine.has_chat_template if chat is None else chat
            prompt: str | list[int] = text
            if through_template:
                prompt = engine.tokens_of([{"role": "user", "content": text}])
            completion = engine.generate(
                prompt,
                sampling={"temperature": 0.0, "max_tokens": max_tokens},
                lora_request=None if adapter is None else adapter.request,
            )
    report = completion.report
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
    if as_json:
        print_json(
            {
                "answer": completion.text,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": completion.prompt_tokens,
                "ttft_ms": completion.ttft_ms,
                "latency_ms": completion.latency_ms,
                "report": report.to_mapping(),
            }
        )
        return
    if show_map:
        print_rich(report)
    typer.echo(completion.text)
    reused = report.exact_tokens + report.reused_tokens
    say(
        f"{completion.prompt_tokens:,} prompt tokens, {reused:,} reused, "
        f"{report.recomputed_tokens:,} of them recomputed; "
        f"first token after {completion.ttft_ms:.0f} ms"
        + (f" ({report.reason})" if report.reason else "")
    )
