"""Streams of server-sent events.

A route brings what is to be opened and how its events look as frames; this file opens it
before the headers, so that a refusal keeps its HTTP status, and makes what fails later
one last error event. Runs on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mtplx.errors import MtplxError
from mtplx.server.errors import BUG, error_body
from mtplx.server.responses import dump

logger = logging.getLogger("mtplx.server")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Opened = TypeVar("Opened")


def frame(value: Mapping[str, Any], event: str | None = None) -> bytes:
    """Return one server-sent event, with its name where the API has one."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dump(value) + b"\n\n"


def error_frame(error: MtplxError) -> bytes:
    """Return the last event of an OpenAI stream that failed."""
    return frame(error_body(error))


class EventStream(StreamingResponse, Generic[Opened]):
    """Streams what a context manager opens.

    Args:
        opened: ``open_turn(...)``, say. What it raises on entering is raised before the
            headers.
        frames: Turns what was opened into the frames of the answer. The first one should
            not wait for the engine.
        error_frame: The last frame of a stream that fails.
    """

    def __init__(
        self,
        opened: AbstractAsyncContextManager[Opened],
        frames: Callable[[Opened], AsyncIterator[bytes]],
        error_frame: Callable[[MtplxError], bytes] = error_frame,
    ) -> None:
        super().__init__((), headers=_HEADERS, media_type="text/event-stream")
        self._opened = opened
        self._frames = frames
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The generation listens for the client; the base class would do it again.
        async with self._opened as opened:
            self.body_iterator = self._guarded(self._frames(opened))
            await self.stream_response(send)

    async def _guarded(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for each in frames:
                yield each
        except ClientDisconnect:
            return
        except MtplxError as error:
            yield self._error_frame(error)
        except Exception:
            logger.exception("A stream failed: a bug in the server")
            yield self._error_frame(BUG)
