"""``mtplx doctor``: what would keep a model from being served here, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtplx.cli.options import ConfigFile, Device, Dtype, LogLevel, Model, configure, flag

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    model: Model = None,
    host: Annotated[str | None, flag("host")] = None,
    port: Annotated[int | None, flag("port")] = None,
    device: Device = None,
    dtype: Dtype = None,
    kv_disk: Annotated[str | None, flag("kv_disk")] = None,
    kv_disk_bytes: Annotated[int | None, flag("kv_disk_bytes")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Look at the machine, the disk folder, the port and the model; exit code 1 when
    something would fail. Changes nothing."""
    settings = configure(
        config,
        model=model,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        kv_disk=kv_disk,
        kv_disk_bytes=kv_disk_bytes,
        log_level=log_level,
    ).settings

    from mtplx.cli import checks
    from mtplx.cli.model_checks import check_named_model

    machine = checks.look_at_machine(settings.device)
    findings = [
        checks.check_machine(machine),
        checks.check_versions(),
        *checks.check_device(machine),
        *checks.check_disk(settings),
        checks.check_port(settings),
        *check_named_model(settings, machine),
    ]
    well = all(finding.status != "problem" for finding in findings)
    if as_json:
        report = {"ok": well, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            told = escape(finding.found)
            if finding.fix is not None:
                told += f"\n[bold]→[/] {escape(finding.fix)}"
            status = f"[{_COLOURS[finding.status]}]{finding.status}[/]"
            table.add_row(status, finding.check, told)
        Console().print(table, highlight=False)
    if not well:
        raise typer.Exit(1)
