"""`semkv quality`: how close reuse comes to full prefill on one's own questions, and what to set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
    print_table,
    say,
)
from semkv_rag.cli.progress_bar import ProgressBar
from semkv_rag.config import DEFAULT_NAMESPACE, ReuseOptions, check_namespace
from semkv_rag.corpus import precompute_texts
from semkv_rag.corpus.chat_prefix import chat_prefix
from semkv_rag.errors import OptionError
from semkv_rag.model_name import check_model
from semkv_rag.quality.codecs import codec_settings, copies
from semkv_rag.quality.measuring import DEFAULT_MAX_TOKENS, DEFAULT_PASSAGES, measure
from semkv_rag.quality.plot import check_plot, plot
from semkv_rag.quality.prompts import DEFAULT_TEMPLATE, Template
from semkv_rag.quality.questions import Question, read_questions
from semkv_rag.quality.recommending import TARGET
from semkv_rag.quality.result import Full, Line, QualityResult
from semkv_rag.quality.settings import DEFAULT_RATIOS, DEFAULT_SELECTORS, grid
from semkv_rag.selectors import SELECTORS
from semkv_rag.store.codecs import codec_names

if TYPE_CHECKING:
    from semkv_rag.corpus import Capturer

SHOWN = 5
"""The most questions that are named among those that were not compared."""


def quality_command(
    model: options.Model,
    store: options.Store,
    questions: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help="A JSON list, or a JSON object in each line."
        ),
    ],
    index_url: options.IndexUrl = None,
    cache_dir: options.CacheDir = None,
    cache_bytes: options.CacheBytes = None,
    namespace: options.Namespace = DEFAULT_NAMESPACE,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One to compare: {', '.join(SELECTORS)}; may be repeated. "
            f"{', '.join(DEFAULT_SELECTORS)} unless any is given."
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            help="One to compare, 0 to 1; may be repeated. "
            f"{', '.join(map(str, DEFAULT_RATIOS))} unless any is given."
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Compare codecs instead: {', '.join(codec_names())}; may be repeated. The preset"
            " balanced out of the stored chunks, which must be plain, and out of copies in a temporary"
            " folder."
        ),
    ] = None,
    question_tokens: options.QuestionTokens = None,
    template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with the form of prompts that are not given whole, with {context} and "
            "{question} in it.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Such a prompt is a user's message, for the chat template."),
    ] = False,
    passages: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many stored chunks, with their neighbours, a bare question is put behind.",
        ),
    ] = DEFAULT_PASSAGES,
    precompute: Annotated[
        bool, typer.Option("--precompute", help="Store the passages (ctxs) of FILE first.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of an answer.")
    ] = DEFAULT_MAX_TOKENS,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first so many questions.")
    ] = None,
    target: Annotated[
        float, typer.Option(help="The share of equal tokens that is close enough, up to 1.")
    ] = TARGET,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A file for all of it, as JSON.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="A file that keeps each question once it is done; the same command goes on from there.",
        ),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            dir_okay=False,
            help="A file for a plot: agreement, KL and F1 by charge. Needs the extra plot.",
        ),
    ] = None,
    lora: options.LoraAdapter = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Ask your own questions by full prefill and out of the store, compare, and recommend what to set.

    A question is {"prompt": "…"} or {"messages": […]}, {"question": "…", "ctxs": [{"title": "…", "text":
    "…"}]}, or {"question": "…"} alone, for which passages are found in the store; "answers" may stand in
    each. Exit code 1: nothing could be compared.
    """
    arguments = options.engine_args(engine_arg)
    check_namespace(namespace)
    settings = grid(
        selector or DEFAULT_SELECTORS,
        DEFAULT_RATIOS if ratio is None else ratio,
        namespace=namespace,
        question_tokens=question_tokens,
    )
    form = Template(DEFAULT_TEMPLATE if template is None else _read(template), chat)
    asked = read_questions(questions)[:limit]
    if not 0 < target <= 1:
        raise OptionError(f"--target {target}: use a number above 0 and up to 1")
    for option, file in (("--out", out), ("--resume", resume)):
        if file is not None and not file.absolute().parent.is_dir():
            raise OptionError(f"{option} {file}: there is no such folder")
    if plot_file is not None:
        check_plot(plot_file)
    if codec and (selector or ratio or precompute):
        raise OptionError("--codec goes without --selector, --ratio and --precompute")
    if codec:
        settings = codec_settings(codec, ReuseOptions(question_tokens=question_tokens))
    if not precompute:
        options.open_store(store, index_url, read_only=True).close()
    check_model(model, arguments.get("download_dir"))
    if (adapter := lora_of(lora)) is not None:
        arguments = adapter.arguments(arguments)
    with data_only_stdout(), ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("questions"))
        from semkv_rag.engine import Engine

        try:
            bar.starting(model)
            where: dict[str, Any] = {
                "store": options.place(store, cache_dir, cache_bytes),
                "index_url": index_url,
            }
            if codec:
                folder = stack.enter_context(TemporaryDirectory(prefix="semkv-quality-"))
                where = {"store": folder}
            engine = stack.enter_context(Engine(model, **where, **arguments))
            lora_request = None if adapter is None else adapter.request
            capturer = engine if lora_request is None else engine.with_adapter(lora_request)
            sizes = {}
            if codec:
                with options.open_store(store, index_url, read_only=True) as kv_store:
                    sizes = copies(kv_store, capturer, settings, namespace)
            if precompute:
                _precompute(capturer, asked, form, namespace, bar)
            result = measure(
                engine,
                asked,
                settings=settings,
                template=form,
                passages=passages,
                max_tokens=max_tokens,
                target=target,
                resume=resume,
                namespace=settings[0].options.namespace if codec else None,
                lora_request=lora_request,
                on_progress=lambda done, total, name: bar.count(done, total, Path(name).name),
            )
        except KeyboardInterrupt:
            bar.stop()
            say("Stopped before the first question was done.")
            raise typer.Exit(INTERRUPTED) from None
    told = result.to_mapping()
    if codec:
        told |= {"recommendation": None, "bytes_per_token": sizes}
    if out is not None:
        text = json.dumps(told, indent=1, ensure_ascii=False)
        out.write_text(text + "\n", encoding="utf-8")
    if plot_file is not None and result.full is not None:
        plot(result, plot_file)
    if as_json:
        print_json(told)
    else:
        _print(result, len(asked), sizes)
    if result.interrupted and result.full is not None:
        kept = "" if resume is None else "; the same command goes on from there"
        say(f"Stopped after {in_words(result.full.questions, 'question')} of {len(asked):,}{kept}")
        raise typer.Exit(INTERRUPTED)
    if result.full is None:
        _say_left_out(result)
        say(
            "Nothing could be compared. Precompute the documents that the prompts are made of into this "
            "store and namespace with semkv precompute, or the ctxs of the questions with --precompute."
        )
        raise typer.Exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not read: {error}") from error


def _precompute(
    capturer: Capturer, asked: Sequence[Question], form: Template, namespace: str, bar: ProgressBar
) -> None:
    """Store the questions' own passages, behind what all prompts start with."""
    documents = [(one.name, [*map(str, one.passages)]) for one in asked if one.passages]
    if not documents:
        raise OptionError("--precompute: no question has ctxs")
    prefix = chat_prefix(capturer.tokenizer, form.prefix) if form.chat else form.prefix
    result = precompute_texts(
        capturer, documents, namespace=namespace, prefix=prefix, on_progress=bar.update
    )
    for failure in result.failures:
        say(f"{failure.source}: {failure.reason}")


def _print(result: QualityResult, asked: int, sizes: Mapping[str, float]) -> None:
    if result.full is None or result.recommendation is None:
        return
    full = result.full
    with_answers = "" if full.f1 is None else f", {full.known:,} with known answers"
    typer.echo(
        f"{in_words(full.questions, 'question')} of {asked:,} compared{with_answers}, "
        f"{in_words(full.tokens, 'token')} of answers by full prefill."
    )
    typer.echo(
        "equal tokens: the likeliest token is that of full prefill, behind the same tokens, %\n"
        "whole answers: token by token the same, %\n"
        "first other: the median place of the first other token, where there is one\n"
        "KL: of the next-token distributions from full prefill's, a lower bound, nats a token\n"
        "charged: what is computed, with whole layers and passes for choosing, % of full prefill\n"
        "first token: the median time to it, ms, with nothing in the prefix cache\n"
    )
    header = ["setting", "selector", "ratio", "charged", "equal tokens", "whole answers"]
    header += ["first other", "KL", "first token"]
    rows = [_row(line) for line in result.lines]
    rows.append(["full prefill", "", "", "100", "", "", "", "", f"{full.ttft_ms:.0f}"])
    if full.f1 is not None:
        header += ["exact match", "F1"]
        known: list[Line | Full] = [*result.lines, full]
        for row, line in zip(rows, known, strict=True):
            row += [_percent(line.exact_match), _percent(line.f1)]
    print_table(header, rows)
    if sizes:
        typer.echo("")
        taken = [(name, f"{size:,.0f}") for name, size in sizes.items()]
        print_table(("codec", "bytes a token"), taken)
        _say_left_out(result)
        return
    advised = result.recommendation
    name = advised.preset or f"{advised.selector} at ratio {advised.ratio:g}"
    typer.echo(f"\nRecommended: {name}. {advised.reason}\n\nWhat this can't tell:")
    for text in result.unknown:
        typer.echo(f"* {text}")
    _say_left_out(result)


def _row(line: Line) -> list[object]:
    agreed = line.agreement
    return [
        line.name,
        line.selector,
        f"{line.ratio:g}",
        f"{100 * line.charged_ratio:.0f}",
        f"{100 * agreed.mean:.1f} [{100 * agreed.low:.1f}, {100 * agreed.high:.1f}]",
        f"{100 * line.answers_equal.mean:.0f}",
        "" if line.first_difference is None else f"{line.first_difference:g}",
        f"{line.kl.mean:.2g}",
        f"{line.ttft_ms:.0f}",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _say_left_out(result: QualityResult) -> None:
    """Name what was not compared."""
    groups = (
        ("with nothing reused", result.not_reused),
        ("with exact spans only", result.exact_only),
        ("not asked with every setting", result.failed),
    )
    for what, left_out in groups:
        if left_out:
            say(f"{in_words(len(left_out), 'question')} {what}, not compared:")
            for one in left_out[:SHOWN]:
                say(f"  {one.question}: {one.reason}")
            if len(left_out) > SHOWN:
                say(f"  and {len(left_out) - SHOWN:,} more")
