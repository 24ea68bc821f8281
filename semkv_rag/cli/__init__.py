"""The command line, `semkv`: data on stdout, progress and notices on stderr.

Exit codes: 0 all is well, 1 something failed or a problem was found, 2 the command was not
understood, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from semkv_rag.cli.ask import ask_command
from semkv_rag.cli.doctor import doctor_command
from semkv_rag.cli.explain import explain_command
from semkv_rag.cli.lifecycle import gc_command, limit_command, pin_command, unpin_command
from semkv_rag.cli.listing import info_command, ls_command
from semkv_rag.cli.plan import plan_command
from semkv_rag.cli.precompute import precompute_command
from semkv_rag.cli.quality import quality_command
from semkv_rag.cli.recode import recode_command
from semkv_rag.cli.serve import serve_command
from semkv_rag.cli.stats import stats_command
from semkv_rag.cli.upkeep import rm_command, verify_command
from semkv_rag.cli.warm import warm_command
from semkv_rag.errors import OptionError, SemKVError

__all__ = ["app", "main"]

app = typer.Typer(
    name="semkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("precompute")(precompute_command)
app.command("ask")(ask_command)
app.command("warm")(warm_command)
app.command("explain")(explain_command)
app.command("quality")(quality_command)
app.command("plan")(plan_command)
app.command("ls")(ls_command)
app.command("info")(info_command)
app.command("rm")(rm_command)
app.command("limit")(limit_command)
app.command("pin")(pin_command)
app.command("unpin")(unpin_command)
app.command("gc")(gc_command)
app.command("verify")(verify_command)
app.command("recode")(recode_command)
app.command("stats")(stats_command)
app.command("doctor")(doctor_command)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve_command
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"semkv-rag {version_of('semkv-rag')}")
        raise typer.Exit


@app.callback()
def _semkv(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version, and exit."
        ),
    ] = False,
) -> None:
    """Precomputed KV caches for RAG on vLLM."""


def main() -> None:
    """Run `semkv` with the process's arguments, and exit."""
    try:
        app()
    except SemKVError as error:
        typer.echo(f"semkv: {error}", err=True)
        sys.exit(2 if isinstance(error, OptionError) else 1)
