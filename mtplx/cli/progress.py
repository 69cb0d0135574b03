"""Progress on the terminal while a model is fetched and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mtplx.cli.options import console
from mtplx.types import Progress as Report


@contextlib.contextmanager
def loading_progress() -> Iterator[Report]:
    """Yield a callback that draws what it is told, one bar for each piece of work."""
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        console=console,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, fraction: float | None) -> None:
        for earlier in tasks.keys() - {what}:
            bars.remove_task(tasks.pop(earlier))
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=None)
        if fraction is not None:
            bars.update(tasks[what], total=1.0, completed=fraction)

    with bars:
        yield report
