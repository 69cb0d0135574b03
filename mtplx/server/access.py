"""The outermost layer: request ids, one log line for a request, and the last net.

A ``RequestRecord`` travels in the ASGI scope; the routes fill it and this file writes
it. An exception that nobody turned into an answer is a bug: its traceback goes to the
log and the client gets a 500 in the usual shape. No prompt text is ever logged.
Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtplx.errors import MtplxError
from mtplx.metrics import PrefillMetrics, StreamMetrics
from mtplx.server.errors import BUG, STOPPING, error_body, row_of
from mtplx.server.responses import dump

logger = logging.getLogger("mtplx.server")

CLIENT_GONE = 499  # What web servers log when nobody waits for the answer.
_KEY = "mtplx.record"


@dataclass
class RequestRecord:
    """What is known of one HTTP request. Owned by the task that serves it.

    Attributes:
        request_id: Hex; the ``X-Request-Id`` header and the end of the answer's id.
        arrival_s: ``time.perf_counter()`` at which the request arrived.
        status: HTTP status sent, or 499 when the client went away before it.
        outcome: How the generation ended; None for other routes.
        metrics: Of the prefill, when it was complete.
        stream: Of the gaps between tokens, when the prefill was complete.
        completion_tokens: Tokens of the answer.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival_s: float = field(default_factory=time.perf_counter)
    status: int | None = None
    outcome: str | None = None
    metrics: PrefillMetrics | None = None
    stream: StreamMetrics | None = None
    completion_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        """Return the record of ``request``."""
        record: RequestRecord = request.scope[_KEY]
        return record

    def line(self, method: str, path: str) -> str:
        """Return the log line."""
        words = [self.request_id, method, quote(path), str(self.status or CLIENT_GONE)]
        if self.outcome is not None:
            words.append(self.outcome)
        if (metrics := self.metrics) is not None:
            words += [
                f"prompt={metrics.prompt_tokens}",
                f"cached={metrics.cached_tokens}",
                f"new={metrics.new_prefill_tokens}",
                f"completion={self.completion_tokens}",
            ]
            if metrics.ttft_s is not None:
                words.append(f"ttft={metrics.ttft_s:.3f}s")
        if (stream := self.stream) is not None and stream.itl_p99_s is not None:
            words.append(f"itl_p99={stream.itl_p99_s:.3f}s")
            if stream.itl_misses and stream.itl_target_s is not None:
                words.append(
                    f"itl_target={stream.itl_target_s:.3f}s missed={stream.itl_misses}"
                )
        words.append(f"total={time.perf_counter() - self.arrival_s:.3f}s")
        return " ".join(words)


class AccessMiddleware:
    """ASGI middleware that gives each request its record, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord()
        scope[_KEY] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                header = (b"x-request-id", record.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # Nobody is left to answer.
        except asyncio.CancelledError:
            # The server stops and has waited its grace for this request.
            if record.status is None:
                await _answer(STOPPING)(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed: a bug in the server", record.request_id)
            if record.status is not None:
                raise  # Half an answer is out; only closing the connection is honest.
            await _answer(BUG)(scope, receive, send_with_id)
        finally:
            logger.info(record.line(scope["method"], scope["path"]))


def _answer(error: MtplxError) -> Response:
    body = dump(error_body(error))
    return Response(body, row_of(error).status, media_type="application/json")
