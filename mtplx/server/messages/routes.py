"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API.

An answer carries the model name that it was asked under, which may be an alias: clients
look their own settings up by it. Its `mtplx` object says which model that was, and
whether a billing value was set to zeros (``billing.py``). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from mtplx.errors import ContextLengthError, MtplxError, UnsupportedFieldError
from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.errors import AnthropicErrorBody, error_body_for
from mtplx.server.keepalive import keep_alive
from mtplx.server.messages.billing import Body, without_check_values
from mtplx.server.messages.body import CountTokensBody, MessagesBody
from mtplx.server.messages.diagnostics import Record, Records
from mtplx.server.messages.events import Answer
from mtplx.server.messages.shapes import (
    AnthropicAnswer,
    CacheDiagnostics,
    MessageEvent,
    TokenCount,
)
from mtplx.server.messages.translate import answer_request, prompt_request
from mtplx.server.openapi import describe
from mtplx.server.responses import json_response
from mtplx.server.service import Service
from mtplx.server.sse import EventStream, frame
from mtplx.server.turn import Turn, TurnEnd, TurnRequest, open_turn, render

PATH = "/v1/messages"

_ANSWERS = describe(
    MessagesBody, AnthropicAnswer, events=MessageEvent, error=AnthropicErrorBody
)
_COUNTS = describe(CountTokensBody, TokenCount, error=AnthropicErrorBody)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add Anthropic's routes to ``app``, which turns what they raise into Anthropic's
    errors, by their path."""
    routes = _Routes(service)
    app.post(PATH, **_ANSWERS)(routes.create_message)
    app.post(f"{PATH}/count_tokens", **_COUNTS)(routes.count_tokens)


class _Routes:
    """The two endpoints, and the records that requests leave for the next ones."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._normalize = service.configuration.settings.normalize_billing_header
        self._records = Records()

    async def create_message(self, request: Request) -> Response:
        """Answer a conversation; with `stream` as server-sent events."""
        try:
            body, served, notes = await self._read(request, MessagesBody)
        except UnsupportedFieldError as error:
            if error.param == "thread":
                # The SDK's tool runner asks for one first, and does without on this code.
                error.code = "thread_unsupported_request"
            raise
        namespace = served.namespace(request, None)
        asked = await asyncio.to_thread(answer_request, body, namespace=namespace)
        opened = _opened(served, request, asked)

        def begin(turn: Turn) -> Answer:
            message_id = f"msg_{RequestRecord.of(request).request_id}"
            return Answer(
                message_id,
                body.model,
                body.max_tokens,
                show_thinking=body.thinking is None or body.thinking.display != "omitted",
                diagnostics=self._diagnose(served, body, message_id, asked, turn),
                notes=notes,
            )

        if body.stream:
            return EventStream(opened, lambda turn: self._frames(begin(turn), turn), _error)
        async with opened as turn:
            answer = begin(turn)
            async for event in turn:
                answer.push(event)
                if isinstance(event, TurnEnd):
                    message = answer.whole(event)
        return json_response(message)

    async def count_tokens(self, request: Request) -> Response:
        """Tell how many tokens the prompt of a conversation has."""
        body, served, _ = await self._read(request, CountTokensBody)
        prompt = await asyncio.to_thread(lambda: render(served, prompt_request(body)))
        return json_response({"input_tokens": len(prompt.token_ids)})

    async def _read(
        self, request: Request, model: type[Body]
    ) -> tuple[Body, Service, dict[str, Any]]:
        """Return the body, the service of its model, and what the `mtplx` object is to
        say about both."""
        settings = self._service.configuration.settings
        body = await read_body(request, model, max_bytes=settings.max_body_bytes)
        served = await self._service.for_model(body.model)
        notes: dict[str, Any] = {"model": served.info.name}
        if self._normalize:
            body, changed = without_check_values(body)
            if changed:
                notes["billing_header_normalized"] = changed
        return body, served, notes

    def _diagnose(
        self,
        service: Service,
        body: MessagesBody,
        message_id: str,
        asked: TurnRequest,
        turn: Turn,
    ) -> CacheDiagnostics | None:
        if body.diagnostics is None:
            return None
        record = Record.of(asked, service.info.fingerprint, len(turn.prompt.token_ids))
        reason = self._records.compare(record, body.diagnostics.previous_message_id)
        self._records.keep(message_id, record)
        return None if reason is None else {"cache_miss_reason": reason}

    def _frames(self, answer: Answer, turn: Turn) -> AsyncIterator[bytes]:
        # Anthropic's clients know an event for this, and all skip it.
        mute = self._service.configuration.settings.sse_keepalive == "off"
        return keep_alive(_events(answer, turn), "off" if mute else "event", _ping)


async def _events(answer: Answer, turn: Turn) -> AsyncIterator[bytes]:
    yield _frame(answer.start(len(turn.prompt.token_ids)))
    async for event in turn:
        for each in answer.push(event):
            yield _frame(each)


@asynccontextmanager
async def _opened(
    service: Service, request: Request, asked: TurnRequest
) -> AsyncIterator[Turn]:
    try:
        async with open_turn(service, request, asked) as turn:
            yield turn
    except ContextLengthError as error:
        # Claude Code looks for these words, and then compacts the conversation.
        raise ContextLengthError(
            f"prompt is too long: {error.message}", param=error.param
        ) from None


def _frame(event: Mapping[str, Any]) -> bytes:
    return frame(event, event["type"])


def _ping() -> bytes:
    return _frame({"type": "ping"})


def _error(error: MtplxError) -> bytes:
    return _frame(error_body_for(PATH, error))
