"""``POST /v1/chat/completions``: the route and its shapes. Runs on the event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.requests import ChatBody
from mtplx.server.responses import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    report,
    usage,
)
from mtplx.server.service import Service
from mtplx.server.sse import EventStream, whole_answer
from mtplx.types import Finished


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a chat, whole or as a stream.

    Raises:
        MtplxError: The request is refused, or it failed.
    """
    settings = service.configuration.settings
    body = await read_body(request, ChatBody, max_bytes=settings.max_body_bytes)
    service.check_model(body.model)
    prompt = await service.chat_prompt(body)
    generation = service.generation(request, body, prompt, param="messages")
    shapes = ChatShapes(
        service, RequestRecord.of(request).request_id, body.stream_options.include_usage
    )
    if body.stream:
        return EventStream(generation, shapes)
    return await whole_answer(generation, shapes)


class ChatShapes:
    """The shapes of one chat answer."""

    def __init__(self, service: Service, request_id: str, include_usage: bool) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = service.info.name
        self._fingerprint = service.fingerprint
        self._include_usage = include_usage

    def whole(self, text: str, finished: Finished) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        assert finished.reason != "cancelled"
        assert finished.metrics is not None
        answer: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finished.reason,
                }
            ],
            "usage": usage(finished.metrics, finished.completion_tokens),
            "system_fingerprint": self._fingerprint,
            "mtplx": report(finished),
        }
        return answer

    def opening(self) -> list[Mapping[str, Any]]:
        """Return the chunk that names the role, which goes out before the prefill."""
        return [self._chunk([_choice({"role": "assistant", "content": ""})])]

    def delta(self, text: str) -> Mapping[str, Any]:
        """Return the chunk for a piece of text."""
        return self._chunk([_choice({"content": text})])

    def closing(self, finished: Finished) -> list[Mapping[str, Any]]:
        """Return the finish chunk and, when asked for, the usage chunk."""
        assert finished.reason != "cancelled"
        assert finished.metrics is not None
        choice = _choice({})
        choice["finish_reason"] = finished.reason
        chunks = [self._chunk([choice])]
        if self._include_usage:
            chunks.append(self._chunk([]))
            chunks[-1]["usage"] = usage(finished.metrics, finished.completion_tokens)
        chunks[-1]["mtplx"] = report(finished)
        return list(chunks)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk


def _choice(delta: ChatDelta) -> ChatChunkChoice:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
