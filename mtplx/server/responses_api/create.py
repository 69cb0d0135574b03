"""``POST /v1/responses``: from a body to a turn, and from its events to the answer.

A response is kept in the store, where that was asked for, however its turn ended; not
when the client went away, nor when it got an HTTP error instead. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count

from fastapi import Request, Response

from mtplx.errors import MtplxError
from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.keepalive import keep_alive
from mtplx.server.responses import json_response
from mtplx.server.responses_api import shapes
from mtplx.server.responses_api.answer import Answer, WireEvent
from mtplx.server.responses_api.body import ResponseBody
from mtplx.server.responses_api.diagnostics import diagnose
from mtplx.server.responses_api.read import read_items, turn_request
from mtplx.server.responses_api.store import Item, ResponseStore, StoredResponse
from mtplx.server.service import Service
from mtplx.server.sse import EventStream, frame
from mtplx.server.turn import Turn, TurnEnd, TurnEvent, TurnRequest, open_turn, render


async def create_response(
    service: Service, store: ResponseStore, request: Request
) -> Response:
    """Answer, whole or as a stream.

    Raises:
        MtplxError: The request is refused, or it failed.
    """
    service, body, read, asked = await _asked(service, store, request)
    record = RequestRecord.of(request)
    run = Run(service, store, body, read, owner=record.api_key_id, name=record.request_id)
    opened = open_turn(service, request, asked)
    if body.stream:
        return EventStream(opened, run.frames, run.failure_frames)
    async with opened as turn:
        async for event in run.events(turn):
            last = event
    return json_response(last["response"])


async def count_input_tokens(
    service: Service, store: ResponseStore, request: Request
) -> Response:
    """Tell the length of the prompt that a response would read.

    Raises as ``create_response``.
    """
    service, _, _, asked = await _asked(service, store, request)
    prompt = await asyncio.to_thread(render, service, asked)
    answer: shapes.InputTokenCount = {
        "object": "response.input_tokens",
        "input_tokens": len(prompt.token_ids),
    }
    return json_response(answer)


async def _asked(
    service: Service, store: ResponseStore, request: Request
) -> tuple[Service, ResponseBody, tuple[Item, ...], TurnRequest]:
    """Return the service of its model, the body, the items it makes the model read, and
    the turn."""
    settings = service.configuration.settings
    body = await read_body(request, ResponseBody, max_bytes=settings.max_body_bytes)
    service = await service.for_model(body.model)
    record = RequestRecord.of(request)
    read = read_items(body, store, owner=record.api_key_id, name=record.request_id)
    namespace = service.namespace(request, body.prompt_cache_key)
    asked = await asyncio.to_thread(turn_request, body, read, namespace)
    return service, body, read, asked


class Run:
    """One response while it is made.

    Args:
        service: Tells the model.
        store: Gets the response.
        body: What was asked for.
        read: The items the model reads.
        owner: The API key of the request.
        name: Unique; the ids contain it.
    """

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        body: ResponseBody,
        read: tuple[Item, ...],
        *,
        owner: str | None,
        name: str,
    ) -> None:
        self._store = store
        self._body = body
        self._read = read
        self._owner = owner
        self._answer = Answer(name, service.tokenizer)
        self._response = shapes.new_response(
            body,
            response_id=f"resp_{name}",
            model=service.info.name,
            created_at=int(time.time()),
        )
        compared = body.prompt_cache_options.comparison_response_id
        self._compare = compared is not None
        # Looked up now, because the store may forget it while the turn runs.
        self._earlier = store.find(compared, owner) if compared is not None else None
        self._numbers = count()
        self._settings = service.configuration.settings

    def frames(self, turn: Turn) -> AsyncIterator[bytes]:
        """Yield the frames of a stream. An error of ``turn`` is for ``failure_frames``."""
        return keep_alive(self._frames(turn), self._settings.sse_keepalive, self._beat)

    def failure_frames(self, error: MtplxError) -> bytes:
        """Return the end of a stream that failed."""
        events = list(self._answer.end("incomplete"))
        response = shapes.failed(self._response, self._answer.items, error)
        self._keep(response)
        events.append({"type": "response.failed", "response": response})
        return b"".join(self._frame(event) for event in events)

    async def events(self, turn: Turn) -> AsyncIterator[WireEvent]:
        """Run ``turn``. The last event has the whole response."""
        yield {"type": "response.created", "response": self._response}
        yield {"type": "response.in_progress", "response": self._response}
        async for event in turn:
            for each in self._told(event):
                yield each

    def _told(self, event: TurnEvent) -> Iterator[WireEvent]:
        return self._end(event) if isinstance(event, TurnEnd) else self._answer.add(event)

    def _end(self, end: TurnEnd) -> Iterator[WireEvent]:
        answer, prewarm = self._answer, self._body.prompt_cache_options.prewarm
        cut_off = end.reason == "length" and not prewarm
        yield from answer.end("incomplete" if cut_off else "completed")
        if not answer.items and not prewarm:
            yield from answer.add_empty_message()
        response = shapes.ended(
            self._response, answer.items, end, cut_off=cut_off, now=int(time.time())
        )
        if self._compare:
            assert end.finished.metrics is not None  # Only a cancelled turn has none.
            response["prompt_cache_diagnostics"] = diagnose(
                self._earlier,
                response,
                self._read,
                end.finished.metrics,
                keys_matter=self._settings.cache_isolation == "prompt-cache-key",
            )
        self._keep(response)
        kind = "response.incomplete" if cut_off else "response.completed"
        yield {"type": kind, "response": response}

    def _keep(self, response: shapes.ResponseObject) -> None:
        if self._body.store:
            self._store.put(StoredResponse(self._owner, response, self._read))

    async def _frames(self, turn: Turn) -> AsyncIterator[bytes]:
        async for event in self.events(turn):
            yield self._frame(event)

    def _beat(self) -> bytes:
        # An event that every client knows, and that says nothing new.
        return self._frame({"type": "response.in_progress", "response": self._response})

    def _frame(self, event: WireEvent) -> bytes:
        kind = event["type"]
        numbered = {"type": kind, "sequence_number": next(self._numbers), **event}
        return frame(numbered, kind)
