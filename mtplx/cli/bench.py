"""``mtplx prefill-bench``: prefill speed at growing context lengths."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
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
    TailGrid,
    configure,
    console,
)
from mtplx.errors import ConfigError

if TYPE_CHECKING:
    from mtplx.prefill_bench import LadderRow


def prefill_bench(
    model: Model = None,
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, such as 512,1k,2k; k is 1024.")
    ] = "512,1k,2k",
    repeats: Annotated[int, typer.Option(min=1, help="Runs for each row.")] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write rows, machine, versions and settings to this file."
        ),
    ] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    prefill_window: PrefillWindow = None,
    tail_grid: TailGrid = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Measure prefill, cold and with a known prefix, at growing context lengths."""
    lengths = parse_contexts(contexts)
    settings = configure(
        config,
        model=model,
        adapter=adapter,
        device=device,
        dtype=dtype,
        prefill_window=prefill_window,
        tail_grid=tail_grid,
        log_level=log_level,
    ).settings

    from mtplx.prefill_bench import conditions, run_ladder

    loaded = load_with_progress(settings)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("Warming up", total=2 * repeats * len(lengths))
        rows = run_ladder(
            loaded,
            lengths,
            repeats=repeats,
            window=settings.prefill_window,
            tail_grid=settings.tail_grid,
            on_run=lambda context, state: bar.update(
                task, advance=1, description=f"{context} tokens, {state}"
            ),
        )
    Console().print(_table(rows, f"{loaded.name}, {loaded.dtype}, {loaded.backend}"))
    if json_file is not None:
        report = conditions(
            loaded,
            contexts=lengths,
            repeats=repeats,
            prefill_window=settings.prefill_window or loaded.prefill_window,
            tail_grid=settings.tail_grid,
        )
        report["rows"] = [asdict(row) for row in rows]
        write_json(json_file, report)


def parse_contexts(text: str) -> list[int]:
    """Return the lengths that a text such as ``512,1k`` names, in tokens.

    Raises:
        ConfigError: One of them is no length.
    """
    lengths = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d*)\s*([kK]?)\s*", word)
        if found is None:
            raise ConfigError(
                f"--contexts cannot contain {word!r}. Write lengths such as 512,1k,2k."
            )
        lengths.append(int(found[1]) * (1024 if found[2] else 1))
    return lengths


def _table(rows: list[LadderRow], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in (
        "tokens",
        "state",
        "cached",
        "new",
        "prefill tok/s",
        "compute tok/s",
        "TTFT s",
        "min-max s",
        "peak MiB",
        "spans",
    ):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for row in rows:
        table.add_row(
            str(row.context_tokens),
            row.state,
            str(row.cached_tokens),
            str(row.new_prefill_tokens),
            f"{row.prefill_tok_s:.0f}",
            f"{row.prefill_compute_tok_s:.0f}",
            f"{row.ttft_s:.3f}",
            f"{row.ttft_min_s:.3f}-{row.ttft_max_s:.3f}",
            f"{row.peak_bytes / 2**20:.0f}",
            str(row.spans),
        )
    return table
