"""``mtplx models``: the models on this machine; fetching and removing them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtplx.cli.loading import loading_progress
from mtplx.cli.options import ConfigFile, Device, Dtype, LogLevel, configure
from mtplx.errors import MtplxError

app = typer.Typer(
    help="The models on this machine: list, fetch and remove them.",
    invoke_without_command=True,
)

Name = Annotated[
    str, typer.Argument(help="As `mtplx models` shows it.", show_default=False)
]

_FITS = {"ok": "[green]yes[/]", "warning": "[yellow]hardly[/]", "problem": "[red]no[/]"}


@app.callback()
def list_models(
    context: typer.Context,
    device: Device = None,
    dtype: Dtype = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """List the models on this machine, with what each takes and whether it fits."""
    if context.invoked_subcommand is not None:
        return
    settings = configure(config, device=device, dtype=dtype, log_level=log_level).settings

    from mtplx.cli.checks import gib, look_at_machine
    from mtplx.cli.model_checks import check_memory
    from mtplx.models.cached import local_models
    from mtplx.models.survey import survey

    found = local_models()
    if not found:
        typer.echo("There are none yet. `mtplx models pull demo` fetches a small one.")
        return
    machine = look_at_machine(settings.device)
    table = Table()
    table.add_column("model", overflow="fold")
    table.add_column("from")
    table.add_column("size", justify="right")
    table.add_column("context", justify="right")
    table.add_column("caches (layers)")
    table.add_column("fits")
    notes = []
    for model in found:
        seen = survey(model.path)
        row = ["", "", "[red]broken[/]"]
        if seen.network is not None:
            kinds = seen.network.cache_kinds.items()
            memory = check_memory(seen, settings, machine)
            row[0] = str(seen.network.context_length)
            row[1] = ", ".join(f"{count} {kind}" for kind, count in kinds)
            if not seen.faults:
                row[2] = _FITS[memory.status]
            if memory.fix is not None:
                notes.append(f"{model.name}: {memory.found} {memory.fix}")
        notes += [f"{model.name}: {fault.what} {fault.fix}" for fault in seen.faults]
        table.add_row(escape(model.name), model.origin, gib(seen.nbytes), *row)
    out = Console()
    out.print(table)
    for note in notes:
        out.print(escape(note), highlight=False)


@app.command("pull")
def pull_model(
    name: Annotated[
        str, typer.Argument(help="Hub id (owner/model), or `demo`.", show_default=False)
    ],
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Fetch a model, and check what arrived. Files that an earlier attempt got stay, and
    a connection that breaks is gone on with."""
    configure(config, log_level=log_level)

    from mtplx.models.demo import fetch_demo
    from mtplx.models.hub import pull
    from mtplx.models.load import hub_error

    with loading_progress() as progress:
        try:
            folder = fetch_demo(progress) if name == "demo" else pull(name, progress)
        except MtplxError:
            raise
        except Exception as error:  # As `load.find_model` has it.
            raise hub_error(name, error) from error
    typer.echo(f"{name} is in {folder}. `mtplx serve {name}` serves it.")


@app.command("rm")
def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Remove a model from this machine."""
    configure(config, log_level=log_level)

    from mtplx.cli.checks import gib
    from mtplx.models.cached import find_cached, remove_model

    model = find_cached(name)
    if not yes:
        typer.confirm(f"Remove {model.name} ({model.path})?", abort=True)
    typer.echo(f"Removed {model.name}; {gib(remove_model(model))} are free again.")
