"""Putting the application on a port, and taking it off cleanly.

The socket is bound here, so that a taken port is one error and not a log of uvicorn's.
A connection that does not send its request is closed after a while, so that many slow
ones cannot use up the sockets; how long a body may take is ``body.py``'s. A signal ends
open streams at once, with an error event, and gives the engine a short grace; the caller
closes the engine afterwards. Runs on the caller's thread, which is the main one when
signals matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtplx.errors import ConfigError

HEADER_TIMEOUT_S = 20.0
"""From the first byte of a request, or the connection, to the end of its headers."""

_GRACE_S = 3
# Longer than clients keep an idle connection, so that they close it and not we: a request
# that crosses our closing fails. (httpx 5 s, undici 4 s, aiohttp 15 s, nginx 60 s.)
_KEEP_ALIVE_S = 75
_MAX_HEADER_BYTES = 32 * 1024
_BACKLOG = 128
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reserve(host: str, port: int) -> socket.socket:
    """Bind a port without listening on it yet.

    A taken port is known before a model is loaded, and nobody can connect before it is.

    Args:
        host: Name or address to listen on.
        port: 0 picks a free one.

    Raises:
        ConfigError: The port is taken, or the address is not of this machine.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Of a name's addresses take IPv4: clients of `localhost` try both.
        family, kind, protocol, _, address = min(
            found, key=lambda each: each[0] != socket.AF_INET
        )
        reserved = socket.socket(family, kind, protocol)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
        except OSError:
            reserved.close()
            raise
    except OSError as error:
        raise ConfigError(_why(host, port, error)) from None
    except UnicodeError:
        raise ConfigError(f"{host!r} is not a host name. Check --host.") from None
    return reserved


class HttpServer:
    """An application on a port.

    Args:
        app: From ``build_app``.
        port: From ``reserve``; closed at the end.
        on_started: Called on the event loop with the URL, once connections are accepted.
        header_timeout_s: As ``HEADER_TIMEOUT_S``.

    Attributes:
        url: Where it can be reached from this machine.

    Raises:
        ConfigError: On construction: another process listens on the port by now.
    """

    def __init__(
        self,
        app: FastAPI,
        port: socket.socket,
        *,
        on_started: Callable[[str], None] | None = None,
        header_timeout_s: float = HEADER_TIMEOUT_S,
    ) -> None:
        host, number = port.getsockname()[:2]
        try:
            port.listen(_BACKLOG)
        except OSError as error:
            port.close()
            raise ConfigError(_why(host, number, error)) from None
        self._listener = port
        self.url = _url(host, number)
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(_Protocol, header_timeout_s=header_timeout_s)),
            ws="none",
            log_config=None,  # the process has configured logging
            log_level="warning",
            access_log=False,  # the application writes its own line
            server_header=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        started = (lambda: on_started(self.url)) if on_started else lambda: None
        self._server = _Server(config, started, app.state.generations.stop)

    def run(self) -> None:
        """Serve until a signal (Ctrl-C, SIGTERM) arrives or ``stop`` is called."""
        with (
            self._listener,
            _sigterm_as_interrupt(),
            contextlib.suppress(KeyboardInterrupt),
        ):
            self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Make ``run`` return soon. Callable from any thread."""
        self._server.should_exit = True


class _Protocol(H11Protocol):
    """A connection that waits for the headers of a request only so long."""

    def __init__(self, *args: Any, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(self._header_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stopping()
        await super().shutdown(sockets)


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken. Choose another with --port; 0 picks one."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights. Choose one above 1023 with --port."
    return f"Cannot listen on {host}, port {port}: {error.strerror}. Check --host."


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    # uvicorn raises the signal again once it has stopped; SIGTERM's default action
    # would then end the process before the caller can close the engine.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _url(host: str, number: int) -> str:
    host = _WILDCARDS.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{number}"
