"""``mtplx verify``: a certificate that chunking, batching and reuse change nothing."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtplx.cli.files import write_json
from mtplx.cli.loading import load_with_progress
from mtplx.cli.options import (
    Adapter,
    ConfigFile,
    Device,
    Dtype,
    LogLevel,
    Model,
    PrefillWindow,
    configure,
    console,
)

if TYPE_CHECKING:
    from mtplx.verify import Check

_COLOURS = {"same": "green", "near tie": "yellow", "not possible": "yellow"}


def verify(
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompt, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens of its greedy answer.")] = 16,
    seed: Annotated[int, typer.Option(help="Another seed gives another prompt.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the certificate to this file, too."),
    ] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    prefill_window: PrefillWindow = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Check on your machine that a prompt read in spans, beside others, restored from
    memory or from disk gives what one pass gives; exit code 1 when it does not."""
    settings = configure(
        config,
        model=model,
        adapter=adapter,
        device=device,
        dtype=dtype,
        prefill_window=prefill_window,
        log_level=log_level,
    ).settings

    from mtplx.models.trial import tolerance
    from mtplx.prefill_bench import conditions
    from mtplx.verify import verify as run

    loaded = load_with_progress(settings)
    with console.status("") as status:
        checks = run(
            loaded,
            tokens=tokens,
            new_tokens=new_tokens,
            seed=seed,
            # The usual window is longer than the prompt, and would split nothing.
            window=prefill_window,
            on_start=lambda name: status.update(f"Checking: {name}"),
        )
    certificate: dict[str, Any] = {
        "passed": all(check.passed for check in checks),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **conditions(
            loaded.info,
            tokens=tokens,
            new_tokens=new_tokens,
            seed=seed,
            prefill_window=prefill_window,
        ),
        "tolerance": tolerance(loaded.dtype),
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
    }
    _show(certificate, checks, Console())
    if json_file is not None:
        write_json(json_file, certificate)
    if not certificate["passed"]:
        raise typer.Exit(1)


def _show(certificate: dict[str, Any], checks: list[Check], out: Console) -> None:
    about, machine = certificate["model"], certificate["machine"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in about["cache_kinds"].items())
    versions = ", ".join(f"{name} {v}" for name, v in certificate["versions"].items())
    facts = {
        "model": f"{about['name']}, {about['dtype']}, fingerprint {about['fingerprint']}",
        "caches": f"{kinds} (layers)",
        "machine": f"{machine['processor']}, {machine['device']}, {machine['backend']}",
        "versions": versions,
        "date": certificate["date"],
        "prompt": "{tokens} tokens and {new_tokens} new ones, seed {seed}".format(
            **certificate["settings"]
        ),
        "reference": "one pass over all of them; a logit may be off by "
        f"{certificate['tolerance']:g} of the largest, by rounding",
    }
    for name, fact in facts.items():
        out.print(f"{name:<10} {escape(fact)}", soft_wrap=True, highlight=False)
    table = Table()
    for heading in ("check", "exercised"):
        table.add_column(heading)
    for heading in ("steps", "max difference", "of the largest"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for check in checks:
        colour = _COLOURS.get(check.verdict, "red")
        table.add_row(
            check.name,
            ", ".join(f"{name} {count}" for name, count in check.reach.items()),
            str(check.compared_steps or ""),
            _number(check.max_difference),
            _number(check.relative_error),
            f"[{colour}]{check.verdict}[/]",
        )
    out.print(table)
    for check in checks:
        if check.note:
            out.print(f"{check.name}: {escape(check.note)}", highlight=False)
        for flip in check.flips:
            out.print(
                f"{check.name}: after token {flip.position} the most likely token is "
                f"{flip.token}, not {flip.expected_token}, which one pass prefers by "
                f"{flip.margin:.2g}.",
                highlight=False,
            )
    out.print(_conclusion(checks), highlight=False)


def _conclusion(checks: list[Check]) -> str:
    bad = [check.name for check in checks if not check.passed]
    if bad:
        return f"[red]FAILED[/]: {', '.join(bad)}."
    compared = sum(check.compared_steps for check in checks)
    skipped = sum(check.verdict == "not possible" for check in checks)
    ties = sum(len(check.flips) for check in checks)
    words = [f"{len(checks) - skipped} checks, {compared} steps compared"]
    if ties:
        words.append(f"{ties} of them near ties")
    if skipped:
        words.append(f"{skipped} checks not possible with this model")
    return f"[green]PASSED[/]: {', '.join(words)}."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
