"""The command ``mtplx``: its sub-commands, and how their errors look.

An error MTPLX raises on purpose is one line on stderr and exit code 1. Each command
lives in a file of its own and imports what is heavy when it runs, so that ``--help``
and ``--version`` answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mtplx import __version__
from mtplx.cli import (
    bench,
    cache,
    chat,
    connect,
    doctor,
    models,
    plan,
    serve,
    simulate,
    top,
    verify,
)
from mtplx.errors import MtplxError

app = typer.Typer(
    name="mtplx",
    help="Serve language models on your own machine: a long prompt freezes nobody, and "
    "no prompt is read twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("top")(top.top)
app.command("prefill-bench")(bench.prefill_bench)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.command("connect")(connect.connect)
app.command("simulate")(simulate.simulate)
bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
bench_app.command("prefill-ladder", help="The same as `mtplx prefill-bench`.")(
    bench.prefill_bench
)
app.add_typer(bench_app, name="bench")
app.add_typer(cache.app, name="cache")
app.add_typer(models.app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtplx {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before any command."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    except MtplxError as error:
        typer.echo(f"mtplx: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
