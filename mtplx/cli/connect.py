"""``mtplx connect``: what a client has to be told, shown or written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from mtplx.cli.clients import CLIENTS, Recipe, Target
from mtplx.cli.options import ConfigFile, LogLevel, configure, flag
from mtplx.config import Settings
from mtplx.errors import ConfigError


def connect(
    client: Annotated[
        str, typer.Argument(help=f"One of {', '.join(CLIENTS)}.", show_default=False)
    ],
    write: Annotated[
        bool,
        typer.Option("--write", help="Put it into the client's files, keeping a copy."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Name of the model (default: the server's first).")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Where the server is (default: as the settings say)."),
    ] = None,
    host: Annotated[str | None, flag("host")] = None,
    port: Annotated[int | None, flag("port")] = None,
    api_key: Annotated[str | None, flag("api_key")] = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Show how to connect a client to the server, or with `--write` do it."""
    if client not in CLIENTS:
        raise ConfigError(
            f"{client!r} is not known here; use one of {', '.join(CLIENTS)}. Any OpenAI or "
            "Anthropic client works with the server's address."
        )
    settings = configure(
        config, host=host, port=port, api_key=api_key, log_level=log_level
    ).settings
    recipe = CLIENTS[client](_target(settings, url, model))

    from mtplx.cli import config_files

    if write:
        if not recipe.files:
            raise ConfigError(
                f"{recipe.title} keeps its settings where only it should write. "
                f"`mtplx connect {client}` shows what to do."
            )
        texts = [
            (file.path, config_files.merged(file.path, file.content, file.head))
            for file in recipe.files
        ]
        for path, text in texts:
            backup = config_files.write(path, text)
            kept = f"; what was there is in {backup}" if backup else ""
            typer.echo(f"{path} is written{kept}.")
    else:
        for file in recipe.files:
            whole = {**file.head, **file.content} if file.head else file.content
            typer.echo(f"# {file.path}")
            typer.echo(config_files.render(file.path, whole))
    typer.echo(_rest(recipe, written=write), nl=False)


def _target(settings: Settings, url: str | None, model: str | None) -> Target:
    """Ask the server, if there is one, what it serves and how long its prompts may be."""
    from mtplx.cli.client import Client, Unreachable, address, first_key

    key = first_key(settings)
    client = Client(url or address(settings), key)
    try:
        models = {each["id"]: each for each in client.models()}
    except Unreachable as error:
        if model is None:
            raise ConfigError(
                f"{error} Or name the model with --model to go on without one."
            ) from None
        models = {}
    finally:
        client.close()
    name = model or next(iter(models))
    context = models.get(name, {}).get("context_length")
    return Target(client.url, name, context, key)


def _rest(recipe: Recipe, *, written: bool) -> str:
    lines = []
    if recipe.instead and not written:
        lines += ["# or instead of that, for one shell:", *_exports(recipe.instead)]
    if recipe.needed:
        lines += ["# in the environment:", *_exports(recipe.needed)]
    if recipe.command is not None:
        lines += ["# to be run:", recipe.command]
    lines += [f"# {note}" for note in recipe.notes]
    return "".join(f"{line}\n" for line in lines)


def _exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
