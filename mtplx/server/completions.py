"""``POST /v1/completions``: the route and its shapes. Runs on the event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.requests import CompletionBody
from mtplx.server.responses import (
    FinishReasonOnWire,
    TextChoice,
    TextCompletion,
    report,
    usage,
)
from mtplx.server.service import Service
from mtplx.server.sse import EventStream, whole_answer
from mtplx.types import Finished


async def create_completion(service: Service, request: Request) -> Response:
    """Continue a text or a list of token ids, whole or as a stream.

    Raises:
        MtplxError: The request is refused, or it failed.
    """
    settings = service.configuration.settings
    body = await read_body(request, CompletionBody, max_bytes=settings.max_body_bytes)
    service.check_model(body.model)
    prompt = await service.text_prompt(body)
    generation = service.generation(request, body, prompt, param="prompt")
    shapes = TextShapes(
        service, RequestRecord.of(request).request_id, body.stream_options.include_usage
    )
    if body.stream:
        return EventStream(generation, shapes)
    return await whole_answer(generation, shapes)


class TextShapes:
    """The shapes of one completion. A chunk looks like the whole answer."""

    def __init__(self, service: Service, request_id: str, include_usage: bool) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = service.info.name
        self._fingerprint = service.fingerprint
        self._include_usage = include_usage

    def whole(self, text: str, finished: Finished) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        assert finished.reason != "cancelled"
        assert finished.metrics is not None
        answer = self._object([_choice(text, finished.reason)])
        answer["usage"] = usage(finished.metrics, finished.completion_tokens)
        answer["mtplx"] = report(finished)
        return answer

    def opening(self) -> list[Mapping[str, Any]]:
        """Return nothing: this API has no role to name."""
        return []

    def delta(self, text: str) -> Mapping[str, Any]:
        """Return the chunk for a piece of text."""
        return self._chunk([_choice(text)])

    def closing(self, finished: Finished) -> list[Mapping[str, Any]]:
        """Return the finish chunk and, when asked for, the usage chunk."""
        assert finished.reason != "cancelled"
        assert finished.metrics is not None
        chunks = [self._chunk([_choice("", finished.reason)])]
        if self._include_usage:
            chunks.append(self._chunk([]))
            chunks[-1]["usage"] = usage(finished.metrics, finished.completion_tokens)
        chunks[-1]["mtplx"] = report(finished)
        return list(chunks)

    def _chunk(self, choices: list[TextChoice]) -> TextCompletion:
        chunk = self._object(choices)
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _object(self, choices: list[TextChoice]) -> TextCompletion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": self._fingerprint,
        }


def _choice(text: str, finish_reason: FinishReasonOnWire | None = None) -> TextChoice:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
