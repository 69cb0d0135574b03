"""The command line's view of ``Settings``: flags, their help, and what they give.

Help texts and defaults come from ``mtplx.config``; nothing is said twice.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from mtplx.config import Configuration, Settings, read_configuration

_CHATTY = ("asyncio", "filelock", "httpcore2", "httpx2", "huggingface_hub")

console = Console(stderr=True)
"""Everything that is not a command's result goes here."""


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    said = field.description or ""
    return said if field.default is None else f"{said} [default: {field.default}]"


def flag(name: str) -> Any:
    """Return the typer option for one setting."""
    words = name.replace("_", "-")
    switch = Settings.model_fields[name].annotation is bool
    declared = f"--{words}/--no-{words}" if switch else f"--{words}"
    return typer.Option(declared, help=_help(name), show_default=False)


Model = Annotated[
    str | None, typer.Argument(help=_help("model"), show_default=False, metavar="[MODEL]")
]
Adapter = Annotated[str | None, flag("adapter")]
Device = Annotated[str | None, flag("device")]
Dtype = Annotated[str | None, flag("dtype")]
PrefillWindow = Annotated[int | None, flag("prefill_window")]
TailGrid = Annotated[int | None, flag("tail_grid")]
LogLevel = Annotated[str | None, flag("log_level")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file with settings (default: the user's config.toml)."
    ),
]


def configure(config: Path | None, **flags: Any) -> Configuration:
    """Read the configuration and start logging at its level.

    Raises:
        ConfigError: A setting cannot be used.
    """
    configuration = read_configuration(flags, file=config)
    logging.basicConfig(
        level=configuration.settings.log_level.upper(),
        format="%(message)s",
        datefmt="%H:%M:%S",
        handlers=[RichHandler(console=console, show_path=False, markup=False)],
        force=True,
    )
    # Other people's libraries: their warnings matter, their chatter does not.
    for name in (
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "filelock",
        "huggingface_hub",
        "asyncio",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It writes to the terminal itself, and would be seen twice.
    logging.getLogger("huggingface_hub").propagate = False
    return configuration
