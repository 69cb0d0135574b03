"""Talks to a running server, as any other client would.

The address comes from a flag, or is where `mtplx serve` would listen with the same
settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from mtplx.config import Settings
from mtplx.errors import MtplxError

CONNECT_TIMEOUT_S = 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerError(MtplxError):
    """The server cannot be reached, or refused."""


class Unreachable(ServerError):
    """Nobody answers there."""


class Client:
    """A server at ``url``, which may end in `/v1`.

    Args:
        url: Where it is.
        api_key: Sent as a bearer token; None sends none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # No limit between two events: reading a long prompt takes what it takes.
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Return what `GET /v1/models` lists.

        Raises:
            ServerError: It has no answer.
        """
        with self._told():
            answer = self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            _check(answer)
            models: list[dict[str, Any]] = answer.json()["data"]
            return models

    def stream(
        self, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Post ``body``, or get where there is none, and yield the events of the answer;
        closing the iterator ends it.

        Raises:
            ServerError: It cannot be reached, refuses, or fails on the way.
        """
        method = "GET" if body is None else "POST"
        with self._told(), self._http.stream(method, path, json=body) as answer:
            if answer.is_error:
                answer.read()
            _check(answer)
            for event in httpx2.EventSource(answer):
                if event.data == "[DONE]":
                    return
                chunk = json.loads(event.data)
                if "error" in chunk:
                    raise ServerError(_message(chunk))
                yield chunk

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise Unreachable(
                f"Nobody answers at {self.url}. Start a server with `mtplx serve`, or name "
                "another with --url."
            ) from None
        except httpx2.InvalidURL:
            raise ServerError(
                f"{self.url!r} is no address; write http://HOST:PORT."
            ) from None
        except httpx2.UnsupportedProtocol:
            raise ServerError(
                f"{self.url!r} is no address; write http://HOST:PORT."
            ) from None
        except (httpx2.HTTPError, httpx2.SSEError, ValueError, KeyError) as error:
            raise ServerError(
                f"{self.url} does not answer as it should: {error or type(error).__name__}."
            ) from None


def address(settings: Settings) -> str:
    """Return where a server with these settings is reached from this machine."""
    host = _WILDCARDS.get(settings.host, settings.host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{settings.port}"


def first_key(settings: Settings) -> str | None:
    """Return the first of the keys that the settings name."""
    keys = (settings.api_key or "").split(",")
    return keys[0].strip() or None


def _check(answer: httpx2.Response) -> None:
    if not answer.is_error:
        return
    try:
        message = _message(answer.json())
    except (ValueError, KeyError, TypeError, AttributeError):
        message = answer.text[:200]
    raise ServerError(f"The server refused ({answer.status_code}): {message}")


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)
