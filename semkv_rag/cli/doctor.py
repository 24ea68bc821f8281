"""`semkv doctor`: is everything there, do the builds fit, is the store sound, can the model reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from semkv_rag.cli import checks, options
from semkv_rag.cli.output import data_only_stdout, print_json


def doctor_command(
    model: Annotated[
        str | None,
        typer.Option(help="Start this model and check that its KV can be reused."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(envvar="SEMKV_STORE", help="Check this store.", file_okay=False),
    ] = None,
    index_url: options.IndexUrl = None,
    engine_arg: options.EngineArgs = None,
    as_json: options.Json = False,
) -> None:
    """Say what is wrong with the installation, a store or a model.

    Each finding says how to mend it. Exit code 1: something does not work. Warnings leave it 0.
    """
    arguments = options.engine_args(engine_arg)
    with data_only_stdout():
        findings = list(_findings(model, store, index_url, arguments))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{finding.status:4}  {finding.check}: {finding.message}")
            if finding.fix:
                typer.echo(f"      to mend it: {finding.fix}")
    if checks.worst(findings) == "fail":
        raise typer.Exit(1)


def _findings(
    model: str | None, store: Path | None, index_url: str | None, arguments: dict[str, Any]
) -> Iterator[checks.Finding]:
    packages = checks.installed_packages()
    yield checks.check_python()
    yield checks.check_vllm(packages)
    yield checks.check_torch(packages)
    yield checks.check_torch_companions(packages)
    yield from checks.check_imports(packages)
    if store is not None:
        yield from checks.check_store(store, index_url)
    if model is not None:
        yield checks.check_model(model, store, index_url, arguments)
