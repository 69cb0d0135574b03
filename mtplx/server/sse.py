"""Answers from a generation: one JSON body, or a stream of server-sent events.

A route brings its shapes (``Shapes``); this file decides the order on the wire. In a
stream the request is submitted before the headers, so that a refusal keeps its HTTP
status; what fails later is an ``error`` event, and the stream ends there. Runs on the
event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtplx.errors import MtplxError
from mtplx.server.errors import BUG, error_body
from mtplx.server.handle import Generation
from mtplx.server.responses import dump
from mtplx.types import Finished, TextDelta

logger = logging.getLogger("mtplx.server")

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Shapes(Protocol):
    """How one route spells its answer."""

    def whole(self, text: str, finished: Finished) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""

    def opening(self) -> list[Mapping[str, Any]]:
        """Return the chunks that go out before any text."""

    def delta(self, text: str) -> Mapping[str, Any]:
        """Return the chunk for a piece of text."""

    def closing(self, finished: Finished) -> list[Mapping[str, Any]]:
        """Return the chunks that end the stream."""


async def whole_answer(generation: Generation, shapes: Shapes) -> Response:
    """Run ``generation`` to its end and return the answer.

    Raises as ``Generation`` does.
    """
    pieces: list[str] = []
    async with generation as events:
        async for event in events:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
            else:
                body = shapes.whole("".join(pieces), event)
    return Response(dump(body), media_type="application/json")


class EventStream(StreamingResponse):
    """Streams a generation. Raises as ``Generation`` does, before the headers."""

    def __init__(self, generation: Generation, shapes: Shapes) -> None:
        super().__init__(
            self._frames(shapes), headers=_HEADERS, media_type="text/event-stream"
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The generation listens for the client; the base class would do it again.
        async with self._generation:
            await self.stream_response(send)

    async def _frames(self, shapes: Shapes) -> AsyncIterator[bytes]:
        try:
            for chunk in shapes.opening():
                yield frame(chunk)
            async for event in self._generation:
                if isinstance(event, Finished):
                    for chunk in shapes.closing(event):
                        yield frame(chunk)
                elif event.text:
                    yield frame(shapes.delta(event.text))
            yield _DONE
        except ClientDisconnect:
            return
        except MtplxError as error:
            yield frame(error_body(error))
        except Exception:
            logger.exception("A stream failed: a bug in the server")
            yield frame(error_body(BUG))


def frame(value: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + dump(value) + b"\n\n"
