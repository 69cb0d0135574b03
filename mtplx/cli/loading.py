"""Loading models as the settings say, with progress on the terminal.

Decides what `also` and `cached_models` mean: each further model is loaded as the first
one, from settings that name it instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mtplx.cli.options import console
from mtplx.config import Settings
from mtplx.errors import ConfigError
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


def load_with_progress(settings: Settings) -> Model:
    """As ``load_model``, and draw how far it is."""
    with loading_progress() as progress:
        return load_model(settings, progress)


def other_models(settings: Settings) -> dict[str, Settings]:
    """Return the settings to load each further model with, by the model's name.

    Raises:
        ConfigError: `also` is not as it should be, or leaves no place for its models.
    """
    others = {
        name: _for_model(settings, source.model, source.adapter)
        for name, source in settings.further_models().items()
    }
    if settings.cached_models:
        from mtplx.models.cached import cached_models

        for name, folder in cached_models().items():
            if name not in others and name != settings.model:
                others[name] = _for_model(settings, str(folder), None)
    if others and settings.max_models < 2:
        raise ConfigError(
            "The first model stays in memory, so `max_models` must be at least 2 to serve "
            "others."
        )
    return others


def _for_model(settings: Settings, model: str, adapter: str | None) -> Settings:
    return settings.model_copy(update={"model": model, "adapter": adapter})
