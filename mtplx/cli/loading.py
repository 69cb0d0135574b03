"""Loading a model as the settings say, with progress on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mtplx.cli.options import console
from mtplx.config import Settings
from mtplx.types import Progress as Report

if TYPE_CHECKING:
    from mtplx.models import Model


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


def load_model(settings: Settings, progress: Report) -> Model:
    """Load the model that the settings name. Runs on the thread that will own MLX.

    Raises:
        ModelLoadError: It cannot be had or read.
        ConfigError: The device cannot be used.
    """
    from mtplx.models import Model

    return Model.load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        adapter=settings.adapter,
        progress=progress,
    )
