"""`semkv doctor`: is everything there, do the builds fit, is the store sound, can the model reuse."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semkv_rag.cli import checks, options
from semkv_rag.cli.output import check_writable, data_only_stdout, print_json
from semkv_rag.errors import OptionError
from semkv_rag.store.place import is_url

if TYPE_CHECKING:
    from semkv_rag.cli.deep.run import Deep


def doctor_command(
    model: Annotated[
        str | None,
        typer.Option(help="Start this model and check that its KV can be reused."),
    ] = None,
    no_start: Annotated[
        bool,
        typer.Option(
            "--no-start",
            help="Look at the model's configuration alone; its weights need not be there. Needs --model.",
        ),
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(envvar="SEMKV_STORE", help="Check this store.", file_okay=False),
    ] = None,
    index_url: options.IndexUrl = None,
    engine_arg: options.EngineArgs = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Check the model at length and measure it, in less than ten minutes. Needs --model.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="With --deep: a file for all of it, as JSON."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say what is wrong with the installation, a store or a model.

    Each finding says how to mend it. Exit code 1: something does not work. Warnings leave it 0.
    """
    arguments = options.engine_args(engine_arg)
    _check_options(model, no_start=no_start, deep=deep, out=out)
    found: Deep | None = None
    with data_only_stdout():
        findings = list(_findings(store, index_url))
        if model is not None and no_start:
            findings.append(checks.check_configuration(model, arguments))
        elif model is not None and not deep:
            findings.append(checks.check_model(model, store, index_url, arguments))
        if model is not None:
            findings.extend(checks.check_dtype(model, arguments))
        if deep and model is not None and checks.worst(findings) != "fail":
            found, finding = _deep(model, store, arguments)
            findings.append(finding)
    told = [asdict(finding) for finding in findings]
    everything = {"findings": told, "deep": found.to_mapping() if found else None}
    if out is not None:
        out.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")
    if as_json:
        print_json(everything if deep else told)
    else:
        _print(findings, found)
    failed = found is not None and any(one.status == "fail" for one in found.results)
    if failed or checks.worst(findings) == "fail":
        raise typer.Exit(1)


def _check_options(model: str | None, *, no_start: bool, deep: bool, out: Path | None) -> None:
    for name, asked in (("--deep", deep), ("--no-start", no_start)):
        if asked and model is None:
            raise OptionError(f"{name} checks a model: add --model FOLDER_OR_NAME")
    if deep and no_start:
        raise OptionError("--deep starts the model: leave --no-start out")
    if out is None:
        return
    if not deep:
        raise OptionError("--out takes what --deep finds: add --deep, or use --json")
    check_writable("--out", out)


def _findings(store: Path | None, index_url: str | None) -> Iterator[checks.Finding]:
    packages = checks.installed_packages()
    yield checks.check_python()
    yield checks.check_vllm(packages)
    yield checks.check_torch(packages)
    yield checks.check_torch_companions(packages)
    yield from checks.check_imports(packages)
    if store is not None:
        yield from checks.check_store(store, index_url)


def _deep(
    model: str, store: Path | None, arguments: dict[str, Any]
) -> tuple[Deep | None, checks.Finding]:
    """What the deep checks find, in a store of their own on the disk of `store`."""
    folder = store.absolute().parent if store is not None and not is_url(store) else None
    if folder is not None and not os.access(folder, os.W_OK):
        folder = None
    with TemporaryDirectory(prefix="semkv-doctor-", dir=folder) as scratch:
        try:
            from semkv_rag.cli.deep.run import run
            from semkv_rag.engine import Engine

            gate, found = run(lambda: Engine(model, store=Path(scratch) / "store", **arguments))
        except Exception as error:  # vLLM's start-up fails with whatever it likes
            return None, checks.model_failed(model, error)
    return found, checks.model_served(model, gate.reason)


def _print(findings: list[checks.Finding], found: Deep | None) -> None:
    for finding in findings:
        typer.echo(f"{finding.status:4}  {finding.check}: {finding.message}")
        if finding.fix:
            typer.echo(f"      to mend it: {finding.fix}")
    if found is not None:
        from semkv_rag.cli.deep.table import print_results

        typer.echo()
        print_results(found.about, found.results)
        typer.echo(f"checked in {found.took_s:.0f} s")
