"""`semkv plan`: does reuse pay, by a model's config and a machine's rates."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from semkv_rag.cli import options
from semkv_rag.cli.output import data_only_stdout, print_json, print_table, size_in_words
from semkv_rag.corpus.context import DEFAULT_CONTEXT, context_modes
from semkv_rag.errors import OptionError
from semkv_rag.planning import (
    GPUS,
    PROMPTS,
    STORAGE_GB_PER_S,
    Measured,
    ModelShape,
    Plan,
    Timing,
    make_plan,
    model_shape,
    storage_gb_per_s,
    timing_of,
    timing_of_gpu,
)
from semkv_rag.store.codecs import PLAIN, codec_named


def plan_command(
    model: options.Model,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"By its data sheet: {', '.join(GPUS)}."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Start the model, and measure this machine for some minutes."
        ),
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="What `semkv doctor --deep --out` measured of this model, on another machine maybe.",
        ),
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            help=f"Where the store is: {', '.join(STORAGE_GB_PER_S)}; or how many GB/s it reads."
        ),
    ] = "nvme",
    corpus_tokens: Annotated[
        str | None, typer.Option(help="Tokens of all documents, such as 2M or 1G.")
    ] = None,
    codec: options.Codec = PLAIN,
    context: Annotated[
        list[str] | None,
        typer.Option(help="As for `semkv precompute`; may be repeated. Both unless given."),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Plan prompts of this length; may be repeated."),
    ] = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Say what a corpus takes to store, and how much sooner answers begin.

    Reads the model's config alone. Times are arithmetic on a GPU's data sheet (--gpu), or come from
    measurements (--measure, --measured).
    """
    arguments = options.engine_args(engine_arg)
    if [gpu is not None, measure, measured is not None].count(True) != 1:
        raise OptionError("say what the model runs on: one of --gpu, --measure and --measured")
    tokens = None if corpus_tokens is None else options.size_in_bytes(corpus_tokens)
    rate = storage_gb_per_s(storage)
    contexts = len(context_modes(context or DEFAULT_CONTEXT))
    codec_named(codec)
    with data_only_stdout():
        shape = model_shape(model, kv_dtype=_kv_dtype(arguments))
        if gpu is not None:
            timing, machine = timing_of_gpu(shape, gpu), gpu
        elif measured is not None:
            timing, machine = _read(measured, shape), measured.name
        else:
            timing, machine = _measure(model, arguments), "this machine"
        plan = make_plan(
            shape,
            timing,
            machine=machine,
            storage_gb_per_s=rate,
            corpus_tokens=tokens,
            contexts=contexts,
            stored_share=_share(codec, shape),
            prompts=tuple(prompt_tokens or PROMPTS),
        )
    if as_json:
        print_json(plan.to_mapping())
    else:
        _print(plan)


def _share(codec: str, shape: ModelShape) -> float:
    """What a codec makes of the KV's bytes."""
    dtype = torch.float32 if shape.number_bytes == 4 else torch.bfloat16
    try:
        taken = codec_named(codec).bytes_per_token(*shape.kv_shapes, dtype)
    except ValueError as error:
        raise OptionError(f"--codec {codec}: {shape.name}: {error}") from error
    return taken * shape.layers / shape.kv_bytes_per_token


def _kv_dtype(arguments: dict[str, Any]) -> str | None:
    dtype = arguments.get("dtype")
    return None if dtype in (None, "auto") else str(dtype)


def _measure(model: str, arguments: dict[str, Any]) -> Timing:
    from semkv_rag.cli.measuring import measure
    from semkv_rag.engine import Engine

    with (
        TemporaryDirectory(prefix="semkv-plan-") as scratch,
        Engine(model, store=Path(scratch) / "store", **arguments) as engine,
    ):
        return measure(engine)


def _read(path: Path, shape: ModelShape) -> Timing:
    """The timing that a file of `semkv doctor --deep --out` holds.

    Raises:
        OptionError: it holds none.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["deep"]["results"]
        found = [
            Measured(
                tokens=int(one["case"].split()[0].replace(",", "")),
                plain_ms=float(one["figures"]["plain_ms"]),
                blend_ms=float(one["figures"]["blend_ms"]),
                load_ms=float(one["figures"]["load_ms"]),
                charged_ratio=float(one["figures"]["charged_ratio"]),
            )
            for one in results
            if one["check"] == "ttft" and one["figures"]
        ]
    except OSError as error:
        raise OptionError(f"--measured {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"--measured {path}: it is not a file of semkv doctor --deep --out"
        ) from error
    return timing_of(found, shape.kv_bytes_per_token)


def _print(plan: Plan) -> None:
    how = "measured" if plan.measured else "by its data sheet"
    typer.echo(f"{plan.model} on {plan.machine} ({how})")
    typer.echo(
        f"KV {plan.kv_bytes_per_token:,} bytes a token, {plan.stored_bytes_per_token:,.0f} stored"
    )
    if plan.store_bytes is not None and plan.precompute_hours is not None:
        typer.echo(
            f"corpus {size_in_words(plan.store_bytes)} on disk,"
            f" {_hours(plan.precompute_hours)} to precompute"
        )
    typer.echo("")
    header = ["prompt, tokens", "plain, ms", "load, ms", "break-even, GB/s"]
    names = list(plan.prompts[0].presets)
    rows = [
        (
            f"{one.tokens:,}",
            f"{one.plain_ms:,.0f}",
            f"{one.load_ms:,.0f}",
            f"{one.break_even_gb_per_s:.2g}",
            *(f"{p.ttft_ms:,.0f} ({p.speedup:.1f}x)" for p in one.presets.values()),
        )
        for one in plan.prompts
    ]
    print_table((*header, *(f"{name}, ms" for name in names)), rows)
    for text in plan.advice:
        typer.echo(f"\n{text}")


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
