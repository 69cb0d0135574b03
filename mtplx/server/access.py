"""The outermost layer: request ids, one log line for a request, and the last net.

A ``RequestRecord`` travels in the ASGI scope; the routes fill it, this file writes it to
the log and hands it to whoever counts. An exception that nobody turned into an answer is
a bug: its traceback goes to the log and the client gets a 500 in the usual shape. Text of
prompts and answers is logged only where a route put it into the record, which it does
with `log_prompts` alone. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtplx.errors import MtplxError
from mtplx.metrics import PrefillMetrics, StreamMetrics
from mtplx.server.errors import BUG, STOPPING, error_body_for, error_headers, row_of
from mtplx.server.responses import dump

logger = logging.getLogger("mtplx.server")

CLIENT_GONE = 499  # What web servers log when nobody waits for the answer.
_KEY = "mtplx.record"
# What a client may name its request: safe in a header, a log line and a shell.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")


@dataclass
class RequestRecord:
    """What is known of one HTTP request. Owned by the task that serves it.

    Attributes:
        request_id: Hex and unique; the end of the answer's id.
        client_id: What the client's ``X-Request-Id`` named it, where that is well formed.
            Clients repeat it when they try again, so nothing is found by it.
        arrival_s: ``time.perf_counter()`` at which the request arrived.
        api_key_id: Which key it came with, as ``auth.Keys`` names it; None without one.
        stranger: Keys are asked for, and it came without; ``auth.py`` says what answers.
        model: Which model answered; None for other routes.
        status: HTTP status sent, or None when the client went away before it.
        outcome: How the generation ended; None for other routes.
        metrics: Of the prefill, when it was complete.
        stream: Of the gaps between tokens, when the prefill was complete.
        completion_tokens: Tokens of the answer.
        prompt_text, answer_text: To be logged; None unless `log_prompts` is set.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    client_id: str | None = None
    arrival_s: float = field(default_factory=time.perf_counter)
    api_key_id: str | None = None
    stranger: bool = False
    model: str | None = None
    status: int | None = None
    outcome: str | None = None
    metrics: PrefillMetrics | None = None
    stream: StreamMetrics | None = None
    completion_tokens: int = 0
    prompt_text: str | None = None
    answer_text: str | None = None

    @classmethod
    def of(cls, request: HTTPConnection) -> RequestRecord:
        """Return the record of ``request``."""
        return cls.of_scope(request.scope)

    @classmethod
    def of_scope(cls, scope: Scope) -> RequestRecord:
        """Return the record of the request with this ASGI scope."""
        record: RequestRecord = scope[_KEY]
        return record

    @property
    def name(self) -> str:
        """What the answer's headers call the request."""
        return self.client_id or self.request_id

    def age_s(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self.arrival_s

    def line(self, method: str, path: str) -> str:
        """Return the log line: ``key=value`` words, values without spaces or in JSON."""
        words: dict[str, object] = {
            "request": self.request_id,
            "client_id": self.client_id,
            "key": self.api_key_id,
            "method": method,
            "path": quote(path),
            "status": self.status or CLIENT_GONE,
            "model": None if self.model is None else quote(self.model),
            "outcome": self.outcome,
        }
        if (metrics := self.metrics) is not None:
            words |= {
                "prompt": metrics.prompt_tokens,
                "cached": metrics.cached_tokens,
                "new": metrics.new_prefill_tokens,
                "miss": metrics.cache_miss_reason,
                "completion": self.completion_tokens,
                "ttft": _seconds(metrics.ttft_s),
            }
        if (stream := self.stream) is not None:
            words["itl_p99"] = _seconds(stream.itl_p99_s)
            if stream.itl_misses:
                words["itl_target"] = _seconds(stream.itl_target_s)
                words["missed"] = stream.itl_misses
        words["total"] = _seconds(self.age_s())
        for key, text in (("in", self.prompt_text), ("out", self.answer_text)):
            words[key] = None if text is None else dump(text).decode()
        return " ".join(
            f"{key}={value}" for key, value in words.items() if value is not None
        )


class AccessMiddleware:
    """ASGI middleware that gives each request its record, and logs it.

    Args:
        app: What it wraps.
        on_end: Told at the end of every request: its method, the route's path (with
            braces for its variables; None where no route was found), and its record.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_end: Callable[[str, str | None, RequestRecord], None] = lambda *_: None,
    ) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(client_id=_client_id(scope))
        scope[_KEY] = record
        # OpenAI's clients read the first, Anthropic's the second.
        headers = [(key, record.name.encode()) for key in (b"x-request-id", b"request-id")]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # Nobody is left to answer.
        except asyncio.CancelledError:
            # The server stops and has waited its grace for this request.
            if record.status is None:
                await error_answer(scope, STOPPING)(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed: a bug in the server", record.request_id)
            if record.status is not None:
                raise  # Half an answer is out; only closing the connection is honest.
            await error_answer(scope, BUG)(scope, receive, send_with_id)
        finally:
            self._on_end(scope["method"], getattr(scope.get("route"), "path", None), record)
            logger.info(record.line(scope["method"], scope["path"]))


def error_answer(scope: Scope, error: MtplxError) -> Response:
    """Return ``error`` in the shape of the API that the path belongs to."""
    body = dump(error_body_for(scope["path"], error))
    headers = error_headers(error)
    return Response(body, row_of(error).status, headers, media_type="application/json")


def _client_id(scope: Scope) -> str | None:
    sent = Headers(scope=scope).get("x-request-id", "")
    return sent if _CLIENT_ID.fullmatch(sent) else None


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}s"
