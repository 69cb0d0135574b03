"""``mtplx prefill-bench``: how fast prompts are read, here or by any server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urldefrag

import typer
from rich.console import Console
from rich.markup import escape
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
    flag,
)
from mtplx.config import Settings
from mtplx.errors import ConfigError

if TYPE_CHECKING:
    from mtplx.prefill_bench import Case, Mode, Target


def prefill_bench(
    model: Model = None,
    cases: Annotated[
        str,
        typer.Option(
            help="What to read: pp512 is a prompt of 512 tokens, pp512@d8192 are 512 "
            "behind 8192 that are known; k is 1024."
        ),
    ] = "pp512,pp1k,pp2k,pp32@d2016",
    modes: Annotated[
        str,
        typer.Option(
            help="cold, memory and disk (where what is known comes from), contended "
            "(beside streams)."
        ),
    ] = "cold,memory",
    repeats: Annotated[int, typer.Option(min=1, help="Runs for each row.")] = 3,
    streams: Annotated[
        int, typer.Option(min=1, help="Streams beside a contended prompt.")
    ] = 2,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure the server there instead, as NAME=URL or NAME=URL#MODEL; may be "
            "given several times."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write rows, machine, versions and settings to this file."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a chart into this PNG file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: compare two files of --json.", metavar="A B"),
    ] = None,
    api_key: Annotated[str | None, flag("api_key")] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    prefill_window: PrefillWindow = None,
    tail_grid: TailGrid = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Measure how fast prompts are read: cold, with a known prefix, and beside streams."""
    if compare is not None:
        _compare(*compare)
        return
    settings = configure(
        config,
        model=model,
        api_key=api_key,
        adapter=adapter,
        device=device,
        dtype=dtype,
        prefill_window=prefill_window,
        tail_grid=tail_grid,
        log_level=log_level or "warning",
    ).settings

    from mtplx.prefill_bench import machine, measure, parse_cases, parse_modes

    wanted, states = parse_cases(cases), parse_modes(modes)
    subjects = []
    for opened in _targets(settings, url, "disk" in states):
        with opened() as target:
            with _progress(repeats * sum(len(c.modes(states)) for c in wanted)) as tell:
                rows = measure(
                    target, wanted, states, repeats=repeats, streams=streams, on_run=tell
                )
            told = [asdict(row) for row in rows]
            subjects.append({"name": target.name, **target.facts(), "rows": told})
    report = {
        **machine(),
        "settings": {
            "cases": [str(case) for case in wanted],
            "modes": states,
            "repeats": repeats,
            "streams": streams,
            "prefill_window": settings.prefill_window,
            "tail_grid": settings.tail_grid,
        },
        "subjects": subjects,
    }
    Console().print(_table(subjects))
    if json_file is not None:
        write_json(json_file, report)
    if plot is not None:
        from mtplx.prefill_bench.chart import draw_chart

        draw_chart(plot, subjects, f"mtplx prefill-bench, {report['machine']['processor']}")


def _targets(
    settings: Settings, urls: list[str] | None, disk: bool
) -> Sequence[Callable[[], contextlib.AbstractContextManager[Target]]]:
    """Return what opens each target; one is open at a time."""
    if not urls:
        return [partial(_local, settings, disk)]
    named = []
    for text in urls:
        name, equals, address = text.partition("=")
        if not name or not equals or "://" not in address:
            raise ConfigError(
                f"--url cannot be {text!r}. Write NAME=URL, such as "
                "mine=http://127.0.0.1:8000."
            )
        named.append(partial(_remote, settings, name, address))
    return named


@contextlib.contextmanager
def _local(settings: Settings, disk: bool) -> Iterator[Target]:
    from mtplx.prefill_bench import LocalTarget

    target = LocalTarget(partial(load_with_progress, settings), settings, disk=disk)
    try:
        yield target
    finally:
        target.close()


@contextlib.contextmanager
def _remote(settings: Settings, name: str, address: str) -> Iterator[Target]:
    from mtplx.cli.client import Client, first_key
    from mtplx.prefill_bench import RemoteTarget

    url, model = urldefrag(address)
    client = Client(url, first_key(settings))
    try:
        yield RemoteTarget(name, client, model or None)
    finally:
        client.close()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Case, Mode], None]]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("Warming up", total=total)
        yield lambda case, mode: bar.update(task, advance=1, description=f"{case}, {mode}")


def _table(subjects: list[dict[str, Any]]) -> Table:
    table = Table()
    for heading in ("server", "case", "mode"):
        table.add_column(heading)
    for heading in (
        "cached",
        "new",
        "prefill tok/s",
        "compute tok/s",
        "TTFT s",
        "min-max s",
        "peak MiB",
        "worst gap ms",
    ):
        table.add_column(heading, justify="right")
    for subject in subjects:
        for row in subject["rows"]:
            table.add_row(
                escape(subject["name"]),
                row["case"],
                row["mode"],
                _number(row["cached_tokens"]),
                _number(row["new_prefill_tokens"]),
                _spread(row["prefill_tok_s"], row["prefill_tok_s_spread"], 0),
                _number(row["prefill_compute_tok_s"]),
                _spread(row["ttft_s"], row["ttft_spread_s"], 3),
                f"{row['ttft_min_s']:.3f}-{row['ttft_max_s']:.3f}",
                _number(row["peak_bytes"], 2**-20),
                _number(row["worst_gap_s"], 1e3),
            )
    return table


def _compare(before: Path, after: Path) -> None:
    from mtplx.prefill_bench import compare

    table = Table(
        title=f"{after} against {before}; above 1 is better", title_justify="left"
    )
    for heading in ("server", "case", "mode"):
        table.add_column(heading)
    for heading in ("prefill tok/s", "TTFT", "worst gap"):
        table.add_column(heading, justify="right")
    for each in compare(_report(before), _report(after)):
        names = dict.fromkeys((each.before, each.after))
        ratios = (each.tok_s_ratio, each.ttft_ratio, each.gap_ratio)
        table.add_row(
            escape(" → ".join(names)),
            each.case,
            each.mode,
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    Console().print(table)


def _report(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no report of `mtplx prefill-bench --json`.")
    return content


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.0f}"


def _spread(value: float | None, spread: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f} ± {spread or 0:.{digits}f}"
