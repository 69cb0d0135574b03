"""API keys: which there are, when they must be, and who is let in.

Decides that a server which other machines can reach has keys, and that without a known
key nothing answers but ``GET /health``, which then tells no settings, and the files of
the page. Keys are kept as hashes; what is shown of one, in a log or a metric, is
``key_id``. Which web pages may call is ``origins.py``. Runs on the event loop, but for
what reads the settings at start.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mtplx.config import Settings
from mtplx.errors import AuthenticationError, ConfigError
from mtplx.server.access import RequestRecord, error_answer

# The status alone; and the page, which holds nothing until it has a key to ask with.
_OPEN_PATHS = frozenset({"/health", "/"})
_OPEN_FOLDER = "/page/"
_ID_CHARS = 12


class Keys:
    """The keys that a server knows. False when there are none: everybody is let in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = tuple(dict.fromkeys(_hash(key) for key in keys))

    def __len__(self) -> int:
        return len(self._hashes)

    def key_id(self, sent: Iterable[str]) -> str | None:
        """Return the id of the first known key in ``sent``, None if none is known.

        Takes the same time whichever key it is, and whether it is one.
        """
        found = None
        for candidate in sent:
            hashed = _hash(candidate)
            for known in self._hashes:
                if hmac.compare_digest(hashed, known) and found is None:
                    found = known.hex()[:_ID_CHARS]
        return found


def read_keys(settings: Settings) -> Keys:
    """Return the keys of ``api_key`` (separated by commas) and of ``api_key_file`` (one
    on each line; empty lines and those that begin with # are left out).

    Raises:
        ConfigError: The file cannot be read, a setting is there and holds no key, a key
            cannot be sent in a header, or there are keys and none is to be asked for.
    """
    sources = {}
    if settings.api_key is not None:
        sources["api_key"] = settings.api_key.split(",")
    if (file := settings.api_key_file) is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The key file {file} cannot be read: {error}") from None
        sources[f"key file {file}"] = [
            line for line in lines if not line.lstrip().startswith("#")
        ]
    keys: list[str] = []
    for name, candidates in sources.items():
        found = [key for candidate in candidates if (key := candidate.strip())]
        if not found:
            raise ConfigError(f"The {name} holds no key. {_advice()}")
        for number, key in enumerate(found, 1):
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise ConfigError(
                    f"Key {number} of the {name} has a character that no header can carry. "
                    "Use letters, digits, - and _."
                )
        keys += found
    if keys and not settings.auth:
        raise ConfigError(
            "There are API keys, and --no-auth says to ask for none. Drop one of the two."
        )
    return Keys(keys)


def check_binding(address: str, keys: Keys, settings: Settings) -> None:
    """Refuse to listen beyond this machine without keys.

    Args:
        address: The numeric address that is listened on.
        keys: From ``read_keys``.
        settings: Where ``auth`` may say that it is meant so.

    Raises:
        ConfigError: Other machines could use the server, and nobody asked for that.
    """
    if len(keys) or not settings.auth or _is_this_machine(address):
        return
    raise ConfigError(
        f"On {address} other machines can use this server, and it has no API key. "
        f"{_advice()} Or say --no-auth, or listen on --host 127.0.0.1."
    )


class AuthMiddleware:
    """ASGI middleware that lets in who knows a key. Stands inside ``AccessMiddleware``
    and CORS, so that a refusal is logged and a browser's question needs no key."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self._keys):
            record = RequestRecord.of_scope(scope)
            sent = _sent_keys(Headers(scope=scope))
            record.api_key_id = self._keys.key_id(sent)
            record.stranger = record.api_key_id is None
            if record.stranger and not _is_open(scope["path"]):
                await error_answer(scope, _refusal(sent))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _sent_keys(headers: Headers) -> list[str]:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "").strip()) if key]


def _refusal(sent: list[str]) -> AuthenticationError:
    return AuthenticationError(
        "This API key is not known here. Check the key in your client's settings."
        if sent
        else "An API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key`."
    )


def _hash(key: str) -> bytes:
    # Of equal length, so that comparing tells nothing of a key's.
    return hashlib.sha256(key.encode()).digest()


def _is_this_machine(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _advice() -> str:
    return f"Set one, for instance this new one: --api-key {secrets.token_urlsafe(24)}."
