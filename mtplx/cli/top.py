"""``mtplx top``: what a running server does, in the terminal.

Shows what the page's live view shows, from the same events; the server records nothing
once it ends. A thread reads the events, this one draws and listens for ``q``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from mtplx.cli.client import Client, ServerError, address, first_key
from mtplx.cli.options import ConfigFile, configure, flag
from mtplx.cli.top_view import Watched, draw
from mtplx.errors import ConfigError

_DRAW_S = 0.25

Event = dict[str, Any]


def top(
    url: Annotated[
        str | None,
        typer.Option(help="Where the server is (default: as the settings say)."),
    ] = None,
    host: Annotated[str | None, flag("host")] = None,
    port: Annotated[int | None, flag("port")] = None,
    api_key: Annotated[str | None, flag("api_key")] = None,
    config: ConfigFile = None,
) -> None:
    """Watch a running server: its streams, its memory, what it keeps. `q` ends it."""
    settings = configure(config, host=host, port=port, api_key=api_key).settings
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()):
        raise ConfigError("mtplx top needs a terminal. GET /v1/live tells the same.")
    client = Client(url or address(settings), first_key(settings))
    try:
        name = client.models()[0]["id"]
        watched = Watched(f"{name} at {client.url}")
        with contextlib.suppress(KeyboardInterrupt):
            _show(console, client, watched)
    finally:
        client.close()


def _show(console: Console, client: Client, watched: Watched) -> None:
    events: queue.SimpleQueue[Event | ServerError] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(client, events), daemon=True).start()
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not _pressed("q"):
            while not events.empty():
                event = events.get()
                if isinstance(event, ServerError):
                    raise event
                watched.take(event)
            live.update(draw(watched, console.width, console.height), refresh=True)


def _read(client: Client, events: queue.SimpleQueue[Event | ServerError]) -> None:
    try:
        for event in client.stream("/v1/live"):
            events.put(event)
        events.put(ServerError(f"The server at {client.url} has stopped."))
    except ServerError as error:
        events.put(error)
    except RuntimeError:
        pass  # The client was closed: nobody watches any more.


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Let keys arrive one by one and unseen; Ctrl-C stays a signal."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(key: str) -> bool:
    """Wait for a moment; say whether ``key`` was pressed, or nobody is there any more."""
    ready, _, _ = select.select([sys.stdin], [], [], _DRAW_S)
    if not ready:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or key.encode() in keys.lower()
