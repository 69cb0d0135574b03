"""Which web pages may call the server.

A browser runs anybody's page, and every page can reach a server on the same machine.
Decided here: other origins may read answers only when they are on the list of
`cors_origins`. A server that asks for keys needs no more, since no page can guess one.
Without keys, two things are refused besides:

- an ``Origin`` that is neither on the list nor this server itself, for every method that
  may change something: browsers send some such requests without asking first;
- a ``Host`` that is a public DNS name: its owner can point it at this machine, and a
  browser then takes his page for our own (DNS rebinding). Addresses and names that
  nobody can register stay free to use (``localhost``, ``host.docker.internal``,
  ``mac.local``). With `--no-auth` any name is accepted: it is the user's to know.

Runs on the event loop.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mtplx.config import Settings
from mtplx.errors import ConfigError, OriginRefusedError
from mtplx.server.access import error_answer

_EXPOSED = ("x-request-id", "request-id", "retry-after")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]*|null", re.IGNORECASE)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Top-level names that are never sold (RFC 6761, 6762, 8375 and ICANN's reservation).
_UNOWNED = frozenset({"localhost", "local", "internal", "test", "arpa"})


class AllowedOrigins:
    """The list of `cors_origins`; in each of them ``*`` stands for any characters.

    Attributes:
        regex: What an allowed origin matches in full; None where there is no list.
    """

    def __init__(self, origins: Iterable[str] = ()) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in origins]
        self.regex = "|".join(patterns) or None

    def __contains__(self, origin: str) -> bool:
        return self.regex is not None and re.fullmatch(self.regex, origin) is not None


def read_origins(settings: Settings) -> AllowedOrigins:
    """Return the origins of `cors_origins`.

    Raises:
        ConfigError: One of them is no origin.
    """
    origins = [each.strip() for each in settings.cors_origins.split(",") if each.strip()]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{origin!r} in cors_origins is no origin. Write scheme and host without a "
                "path, https://example.com or tauri://localhost say, or * for all."
            )
    return AllowedOrigins(origins)


class OriginMiddleware:
    """ASGI middleware that answers browsers and refuses pages that may not call.

    Args:
        app: What it wraps.
        allowed: From ``read_origins``.
        keyless: The server asks for no keys.
        any_host: Any name may be its own.
    """

    def __init__(
        self, app: ASGIApp, *, allowed: AllowedOrigins, keyless: bool, any_host: bool
    ) -> None:
        self._cors = CORSMiddleware(
            self._guard,
            allow_origin_regex=allowed.regex,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )
        self._app = app
        self._allowed = allowed
        self._keyless = keyless
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._cors(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keyless:
            refusal = self._refusal(scope["method"], Headers(scope=scope))
            if refusal is not None:
                await error_answer(scope, refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> OriginRefusedError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and origin in self._allowed:
            return None
        if not self._any_host and not _may_be_ours(_name(host)):
            return OriginRefusedError(
                f"The host {host[:100]!r} is a public name, which may be pointed at this "
                "machine by anybody. Call it by its address, or start the server with "
                "--api-key or --no-auth."
            )
        if origin is None or method in _SAFE_METHODS or _is_own(origin, host):
            return None
        return OriginRefusedError(
            f"Pages of {origin[:100]!r} may not call this server. "
            f"Start it with --cors-origins {origin[:100]} to allow it."
        )


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return "invalid.host"


def _may_be_ours(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        _, dot, last = name.rstrip(".").rpartition(".")
        return not dot or last in _UNOWNED
    return True


def _is_own(origin: str, host: str) -> bool:
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
